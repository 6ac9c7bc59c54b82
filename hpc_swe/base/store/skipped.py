"""Remember the batches that the learner skipped in a row, and the weights that it refused to export.

Their gradients, or the weights, were not finite.

The count lies in the run folder, so a learner that starts again continues it, and a tick knows when another
start would only skip the same batches.
"""

from collections.abc import Callable
from typing import NoReturn

from msgspec.structs import replace

from hpc_swe.base.errors import ConfigError, NodeError
from hpc_swe.base.records import Record
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic


class SkippedBatches(Record, frozen=True, kw_only=True):
    """List the batches that the learner skipped since the last one that it trained."""

    steps: list[int] = []
    broken: int = 0
    """Last step after which the weights were not finite; 0 is none."""
    final: str = ""
    """Why another start would compute such weights, too."""

    def after(self, step: int, is_skipped: bool) -> "SkippedBatches":
        """Return the record after a batch, which may be one that a former start trained, too."""
        later = [each for each in self.steps if each > step]
        if is_skipped:
            later = [*(each for each in self.steps if each < step), step, *later]
        return replace(self, steps=later)

    @property
    def in_a_row(self) -> list[int]:
        """Return the longest series of steps without a gap, the latest of several."""
        series: list[int] = []
        longest: list[int] = []
        for step in self.steps:
            series = [*series, step] if series and step == series[-1] + 1 else [step]
            longest = series if len(series) >= len(longest) else longest
        return longest


def read(run: RunDir) -> SkippedBatches:
    """Read the record of a run; raise CorruptRecord when it does not decode."""
    try:
        return atomic.get(run.skipped_steps, SkippedBatches)
    except FileNotFoundError:
        return SkippedBatches()


def enter(run: RunDir, step: int, is_skipped: bool, check: Callable[[], None] = lambda: None) -> None:
    """Enter a batch that was trained or skipped; raise StorageError when that cannot be written.

    `check` is called just before a change, and prevents it by an error.
    """
    known = read(run)
    if (found := known.after(step, is_skipped)) != known:
        atomic.put(run.skipped_steps, found, check=check)


def refusal(run: RunDir, limit: int) -> str:
    """Return why the learner must not go on, with remedies; empty after at most `limit` skipped batches."""
    known = read(run)
    if known.final:
        return known.final
    steps = known.in_a_row
    if len(steps) <= limit:
        return ""
    return (
        f"more than {limit} batches in a row, {len(steps)}, the last of them batch {steps[-1]}, "
        f"had a gradient that is not finite, and are kept in {run.skipped(0).parent}. Start another run from "
        "earlier weights with a lower learner.optimizer.lr; or remove "
        f"{run.skipped_steps} to try the same batches again"
    )


def refuse_weights(run: RunDir, step: int, why: str, check: Callable[[], None] = lambda: None) -> NoReturn:
    """Raise NodeError when the weights after a step are not finite for the first time, then ConfigError.

    A faulty device makes such weights, too. So the steps since the last checkpoint are repeated, if possible
    on another node. When that step or one before it fails then, or none was taken, another start would not
    help.
    """
    known = read(run)
    if step == 0 or step <= known.broken:
        final = (
            f"{why}, after step {step}; start another run from earlier weights with a lower "
            "learner.optimizer.lr, or with another `model` if these are its own weights; or, to repeat the "
            f"steps once more, remove {run.skipped_steps}"
        )
        atomic.put(run.skipped_steps, replace(known, final=final), check=check)
        raise ConfigError(final)
    atomic.put(run.skipped_steps, replace(known, broken=step), check=check)
    raise NodeError(
        f"{why}, after step {step}; a faulty node may be the reason, so the job ends, and the next one "
        "repeats the steps since the last checkpoint; a second time up to this step ends the training"
    )
