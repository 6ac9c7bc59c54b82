"""Choose the best weights of a run by its evaluations, and tell when further training brings nothing."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """Name the step with the highest solve rate, the earliest among equals."""

    step: int
    rate: float
    rounds_since: int
    """Evaluations of later steps that are surely no better."""


@dataclass(frozen=True)
class EvalRate:
    """Hold what an evaluation says about the weights of its step."""

    solved: float
    """Solve rate; attempts that the infrastructure failed count as not resolved."""
    failed: float = 0.0
    """Share of these attempts."""

    @property
    def highest(self) -> float:
        """Return the rate if each failed attempt had resolved its task."""
        return self.solved + self.failed


def select(rates: Mapping[int, EvalRate]) -> Selection | None:
    """Select among evaluations, given by step; None when there is none.

    An outage must not end a training: an evaluation that would be better without its failed attempts is not
    counted as one that is no better. Attempts that fail in every evaluation make no difference.
    """
    if not rates:
        return None
    best = max(sorted(rates), key=lambda step: rates[step].solved)
    no_better = [step > best and rate.highest <= rates[best].highest for step, rate in rates.items()]
    return Selection(best, rates[best].solved, sum(no_better))
