"""Estimate solve rates with intervals over tasks, paired gains between two evaluations, and pass@k.

Episodes of one task are not independent, so the bootstrap resamples tasks, or groups of similar tasks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hpc_swe.base.store.parquet.evals import Attempt

DRAWS = 10_000
POWER, LEVEL = 0.8, 0.05
ROUNDING = 1e-9  # means that differ by less are equal
Outcomes = Mapping[str, Sequence[float]]  # task id -> one number per episode, 1 where it was resolved


@dataclass(frozen=True)
class Estimate:
    """Hold a mean over tasks with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def outcomes(attempts: Iterable[Attempt], sampling: str) -> dict[str, list[float]]:
    """Return the outcomes of one decoding, from the rows of an evaluation's table."""
    found: dict[str, list[float]] = {}
    for attempt in attempts:
        if attempt.sampling == sampling:
            found.setdefault(attempt.task_id, []).append(float(attempt.outcome == "resolved"))
    return found


def solve_rate(outcomes: Outcomes) -> Estimate:
    """Return the mean over tasks of each task's mean. Source: Efron and Tibshirani 1993, chapter 13."""
    return _bootstrap(np.array([np.mean(outcomes[task]) for task in sorted(outcomes)]))


def share(hits: int, total: int) -> Estimate:
    """Return hits / total with Wilson's interval, which has a width at 0 and 1, too; a bootstrap's has none.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    mean, weight = hits / total, NormalDist().inv_cdf(1 - LEVEL / 2) ** 2 / total
    middle, half = mean + weight / 2, sqrt(weight * mean * (1 - mean) + weight**2 / 4)
    return Estimate(mean, (middle - half) / (1 + weight), (middle + half) / (1 + weight))


def pass_rate(outcomes: Outcomes, k: int) -> Estimate:
    """Return the mean over tasks of the unbiased chance that one of k episodes is resolved."""
    found = [pass_at_k(len(outcomes[task]), round(sum(outcomes[task])), k) for task in sorted(outcomes)]
    return _bootstrap(np.array(found))


def gain(before: Outcomes, after: Outcomes, groups: Mapping[str, str] | None = None) -> Estimate:
    """Return the mean difference after - before, paired by task.

    With `groups`, task id -> group, groups are resampled. Source: Davison and Hinkley 1997, section 3.8.
    """
    labels = [groups[task] for task in sorted(before)] if groups else None
    return _bootstrap(_differences(before, after), labels)


def detectable(outcomes: Outcomes) -> float:
    """Return the smallest paired gain that another evaluation on these tasks would detect with POWER.

    The two evaluations are assumed to be independent, and equally noisy.
    """
    return _smallest(np.array([np.mean(outcomes[task]) for task in outcomes]) * np.sqrt(2.0))


def detectable_gain(before: Outcomes, after: Outcomes) -> float:
    """Return the smallest gain that two evaluations detect, from the spread of their differences by task."""
    return _smallest(_differences(before, after))


def pass_at_k(episodes: int, resolved: int, k: int) -> float:
    """Return the unbiased chance that one of k episodes is resolved (Chen et al. 2021, arXiv 2107.03374).

    Example:
        >>> pass_at_k(episodes=4, resolved=1, k=2)
        0.5
    """
    if episodes - resolved < k:
        return 1.0
    return 1.0 - comb(episodes - resolved, k) / comb(episodes, k)


def _differences(before: Outcomes, after: Outcomes) -> NDArray[np.float64]:
    if before.keys() != after.keys():
        raise ValueError(f"different tasks: {sorted(before.keys() ^ after.keys())[:5]} ...")
    return np.array([np.mean(after[task]) - np.mean(before[task]) for task in sorted(before)])


def _smallest(values: NDArray[np.float64]) -> float:
    """Return the smallest mean that a two-sided test would distinguish from 0; 1 for a single task.

    When all tasks are alike there is no spread, but up to a share of 3/n could still differ. Source: Hanley
    and Lippman-Hand 1983, "If nothing goes wrong, is everything all right?".
    """
    if len(values) < 2:
        return 1.0
    if np.ptp(values) < ROUNDING:
        return min(1.0, 3 / len(values))
    normal = NormalDist()
    error: float = np.std(values, ddof=1).item() / len(values) ** 0.5
    return error * (normal.inv_cdf(1 - LEVEL / 2) + normal.inv_cdf(POWER))


def _bootstrap(values: NDArray[np.float64], labels: Sequence[str] | None = None) -> Estimate:
    """Return the mean; values are resampled one by one, or in groups of equal labels."""
    if not len(values):
        raise ValueError("no task was evaluated")
    groups = np.unique(labels, return_inverse=True)[1] if labels else np.arange(len(values))
    sums, sizes = np.bincount(groups, values), np.bincount(groups)
    picks = np.random.default_rng(0).integers(0, len(sums), (DRAWS, len(sums)))
    low, high = np.percentile(sums[picks].sum(axis=1) / sizes[picks].sum(axis=1), [2.5, 97.5])
    return Estimate(float(values.mean()), float(low), float(high))
