"""Say when a step shows that learner and sampler have come apart, or that its gradient is far too large.

An alarm changes nothing: the status shows it, and `launch start --wait` logs it. `[stop]` can end a run by
signs like these, and only gradients that are not finite stop a learner by themselves.
"""

from collections import deque
from collections.abc import Mapping
from statistics import median

HIGHEST_GAP = 0.01
"""Of gap/k3. Rounding makes less than a hundredth of it; a loop that fell had it as it fell."""
LOWEST_SHARE = 0.5
"""Of ratio/effective_share: below it a batch teaches less than half of its tokens would."""
NORMS = 10.0
"""How many times the median of the last steps a norm of the gradient may be."""
KNOWN, FEWEST = 50, 5


class Alarm:
    """Look at the metrics of each step in turn."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=KNOWN)

    def look(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return what is out of the ordinary in a step; empty when nothing is."""
        found, norm = [], metrics.get("policy/grad_norm", 0.0)
        if (gap := metrics.get("gap/k3", 0.0)) > HIGHEST_GAP:
            found.append(f"gap/k3 = {gap:.3g} is above {HIGHEST_GAP:g}")
        if (share := metrics.get("ratio/effective_share", 1.0)) < LOWEST_SHARE:
            found.append(f"ratio/effective_share = {share:.3g} is below {LOWEST_SHARE:g}")
        if len(self._norms) >= FEWEST and norm > NORMS * (usual := median(self._norms)) > 0:
            found.append(f"policy/grad_norm = {norm:.3g} is {norm / usual:.0f} times the median of before")
        if norm > 0:  # also false for nan
            self._norms.append(norm)
        return f"alarm in step {step}: {'; '.join(found)}" if found else ""
