"""Choose the best weights of a run by its evaluations, and tell when further training brings nothing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hpc_swe.base import intervals
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.base.store.parquet import evals
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.config.settings import EvalConfig


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


def rate_of(rows: Sequence[Attempt], config: EvalConfig) -> EvalRate:
    """Return what the table of an evaluation says by the decoding that selects the best weights."""
    label = next(iter(config.decodings))
    outcomes = intervals.outcomes(rows, label)
    if not outcomes:
        return EvalRate(0.0)
    failed = fmean(row.outcome == "infra_error" for row in rows if row.sampling == label)
    return EvalRate(fmean(fmean(solved) for solved in outcomes.values()), failed)


def best(run: RunDir, config: EvalConfig) -> Selection | None:
    """Select among the evaluations of a run; raise CorruptRecord if one cannot be read."""
    steps = steps_of(name.removesuffix(".parquet") for name in atomic.names(run.evals))
    return select({step: rate_of(evals.read(run.eval_table(label)), config) for label, step in steps.items()})


def steps_of(labels: Iterable[str]) -> dict[str, int]:
    """Return the step of each label that names one, such as step_000004; other evaluations have none."""
    parts = [(label, label.removeprefix("step_")) for label in labels]
    return {label: int(step) for label, step in parts if label != step and step.isdecimal()}
