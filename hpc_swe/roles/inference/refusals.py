"""Remember which versions an engine has refused, and when the newest of them may be tried again."""

import time
from dataclasses import dataclass, field

from hpc_swe.base.records import WeightVersion


@dataclass
class Refusals:
    """Count the refusals of one supervisor, over all engines that it starts."""

    retry_s: float
    """After so long an engine tries a refused version again, while there is no newer one."""
    in_row: int = 0
    """Refusals since an engine had the newest version."""
    _at: dict[WeightVersion, float] = field(default_factory=dict, init=False)

    def __contains__(self, version: WeightVersion | None) -> bool:
        return version in self._at

    def __bool__(self) -> bool:
        return bool(self._at)

    def note(self, version: WeightVersion) -> None:
        """Note that an engine has refused a version."""
        self._at[version] = time.monotonic()
        self.in_row += 1

    def pass_over(self, version: WeightVersion, refusals: int = 0) -> None:
        """Note that no engine will try a version again, and count this as so many refusals."""
        self._at[version] = float("inf")
        self.in_row += refusals

    def may_try(self, version: WeightVersion, since: float) -> bool:
        """Return whether an engine that has served since then may load a version."""
        return version not in self or time.monotonic() >= max(self._at[version], since) + self.retry_s

    def forgive(self) -> None:
        """Let the next engine try all versions again."""
        self._at.clear()

    def end(self, version: WeightVersion) -> None:
        """Note that the engine has the newest version."""
        self._at.pop(version, None)
        self.in_row = 0
