"""Choose the best weights of a run by its evaluations, and tell when further training brings nothing."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """Name the step with the highest solve rate, the earliest among equals."""

    step: int
    rate: float
    rounds_since: int
    """Evaluations that have finished for later steps."""


def select(rates: Mapping[int, float]) -> Selection | None:
    """Select among evaluations, given as step -> solve rate; None when there is none."""
    if not rates:
        return None
    best = max(sorted(rates), key=lambda step: rates[step])
    return Selection(best, rates[best], sum(step > best for step in rates))
