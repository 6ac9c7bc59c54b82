"""Follow an evaluation: how far it is, what it waits for, and the bar that shows it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hpc_swe.errors import DeadlineError, HpcSweError
from hpc_swe.rundir import RunDir
from hpc_swe.runs.view import RunReader, RunView, duration
from hpc_swe.settings import RunConfig
from hpc_swe.store import tasks


@dataclass(frozen=True)
class EvaluationProgress:
    """How far an evaluation is, and what it waits for."""

    done: int
    """Episodes."""
    solved: int
    waits_for: str
    is_queued: bool
    """Jobs wait for the scheduler, which may take its time."""
    moved: object
    """Equal as long as nothing moves."""
    failed: int = 0
    """Episodes that infrastructure failed to the last."""


class StallDetector:
    """Ends a wait in which nothing moves for so long, unless jobs wait for the scheduler."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._moved: object = None
        self._since = clock()

    def look(self, progress: EvaluationProgress) -> None:
        """Raises DeadlineError."""
        if progress.moved != self._moved or progress.is_queued:
            self._moved, self._since = progress.moved, self._clock()
        silent_s = self._clock() - self._since
        if silent_s > self._limit_s:
            raise DeadlineError(
                f"nothing moved for {duration(silent_s)} (coordinator.wait_s and rollout.episode_timeout_s); "
                f"it waits for {progress.waits_for}"
            )


class ProgressBar:
    """The bar."""

    def __init__(self, run: RunDir, config: RunConfig, console: Console) -> None:
        self._reader, self._detector = RunReader(run, config), StallDetector(_limit_s(config))
        told = TextColumn("{task.description}", markup=False)  # an error may hold brackets
        columns = (told, BarColumn(), MofNCompleteColumn())
        self.bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
        self.total = size(run, config)
        self._row = self.bar.add_task(run.root.name, total=self.total)
        self._first, self._began = -1, time.monotonic()
        self.progress = EvaluationProgress(0, 0, "its jobs", True, None)

    def look(self) -> None:
        """Draw how it stands.

        Raises:
            DeadlineError: It has not moved for too long.
        """
        try:
            self.progress = progress_of(self._reader.look())
        except (HpcSweError, OSError) as error:  # a file half gone, or a file system away for a while
            waits_for = f"a look that does not fail: {error}"
            self.progress = replace(self.progress, waits_for=waits_for, is_queued=False)
        self._first = self.progress.done if self._first < 0 else self._first
        minutes = max(time.monotonic() - self._began, 1.0) / 60
        failed = f", {self.progress.failed} infra failures" if self.progress.failed else ""
        told = (
            f"{self.progress.solved} solved{failed}, {(self.progress.done - self._first) / minutes:.1f}/min"
        )
        waits = f"; {self.progress.waits_for}"[:60]
        self.bar.update(self._row, completed=self.progress.done, description=told + waits)
        self._detector.look(self.progress)

    def end(self) -> None:
        """It has finished."""
        self.bar.update(self._row, completed=self.total, description="finished")


def _limit_s(config: RunConfig) -> float:
    """The coordinator's patience begins anew with its process, and a last episode may take its whole time."""
    return config.coordinator.wait_s + config.rollout.episode_timeout_s


def progress_of(view: RunView) -> EvaluationProgress:
    """What a look says."""
    report, queue = view.report, view.queue
    pending = [job for job in queue.jobs if job.state != "running"]
    recent = report.recent if report else {}
    names = ("done", "resolved", "infra")
    done, solved, failed = (int(recent.get(f"evaluation/{name}", [0.0])[-1]) for name in names)
    if queue.silence:
        waits_for = "the scheduler, which does not answer"
    elif queue.failures:
        waits_for = "; ".join(queue.failures)
    elif pending:
        roles = ", ".join(sorted({f"{job.role}: {job.reason}" for job in pending}))
        waits_for = f"{len(pending)} jobs in the queue ({roles})"
    elif report is None:
        waits_for = "the coordinator"
    elif not view.engines:
        waits_for = "an engine that serves"
    else:
        waits_for = "; ".join([report.waits_for, *report.errors[-1:]])
    moved = (done, report.spools if report else None, len(view.engines))
    return EvaluationProgress(done, solved, waits_for, bool(pending or queue.silence), moved, failed)


def size(run: RunDir, config: RunConfig) -> int:
    """Episodes in all."""
    held_out = tasks.read(run.tasks)["eval"][: config.eval.tasks or None]
    return len(held_out) * len(config.eval.decodings) * config.eval.samples
