"""Follow an evaluation: count what is done, say what it waits for, draw a bar, and detect a stall."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import TimeRemainingColumn

from hpc_swe.base.errors import DeadlineError
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.parquet import tasks
from hpc_swe.base.tables import bars
from hpc_swe.config.settings import WAIT_S, RunConfig
from hpc_swe.launch.view import RunView, duration


@dataclass(frozen=True)
class EvaluationProgress:
    """The progress of an evaluation is the number of its finished episodes, and what it waits for."""

    done: int
    """Finished episodes."""
    solved: int
    waits_for: str
    is_queued: bool
    """Whether jobs wait for the scheduler, which may take any time."""
    state: object
    """A value that changes with every step of progress."""
    failed: int = 0
    """Episodes whose attempts all failed on infrastructure."""


class StallDetector:
    """A stall is a time without progress that is longer than a limit, while no jobs wait in the queue."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._state: object = None
        self._since = clock()

    def check(self, progress: EvaluationProgress) -> None:
        """Raise DeadlineError, with what is waited for, when the evaluation has stalled."""
        if progress.state != self._state or progress.is_queued:
            self._state, self._since = progress.state, self._clock()
        stalled_s = self._clock() - self._since
        if stalled_s > self._limit_s:
            raise DeadlineError(
                f"no progress for {duration(stalled_s)} (the limit is {WAIT_S:g} s + "
                f"rollout.episode_timeout_s + supervision.stuck_s); it waits for {progress.waits_for}"
            )


class ProgressBar:
    """A bar shows the progress of an evaluation on the terminal, until it has finished or stalled."""

    def __init__(self, run: RunDir, config: RunConfig, console: Console) -> None:
        # Supervision restarts what is stuck, and one last episode may take all of its time.
        patience_s = config.rollout.episode_timeout_s + config.supervision.stuck_s
        self._detector = StallDetector(WAIT_S + patience_s)
        self.bar = bars(TimeRemainingColumn(), console=console)
        self.total = episodes(run, config)
        self._row = self.bar.add_task(run.root.name, total=self.total)
        self._done_at_start, self._started = -1, time.monotonic()
        self.progress = EvaluationProgress(0, 0, "its jobs", True, None)

    def update(self, view: RunView | str) -> None:
        """Draw a view of the run, or a text that says why there is none; raise DeadlineError for a stall."""
        if isinstance(view, RunView):
            self.progress = progress_of(view)
        else:
            waits_for = f"a readable run folder: {view}"
            self.progress = replace(self.progress, waits_for=waits_for, is_queued=False)
        done, failed = self.progress.done, self.progress.failed
        self._done_at_start = done if self._done_at_start < 0 else self._done_at_start
        rate = (done - self._done_at_start) / (max(time.monotonic() - self._started, 1.0) / 60)
        infra = f", {failed} infra failures" if failed else ""
        waits = f"; {self.progress.waits_for}"[:60]
        description = f"{self.progress.solved} solved{infra}, {rate:.1f}/min{waits}"
        self.bar.update(self._row, completed=done, description=description)
        self._detector.check(self.progress)

    def end(self) -> None:
        """Draw the bar of an evaluation that has finished."""
        self.bar.update(self._row, completed=self.total, description="finished")


def progress_of(view: RunView) -> EvaluationProgress:
    """Return the progress that a view of the run shows."""
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
        waits_for = "an available engine"
    else:
        waits_for = "; ".join([report.waits_for, *report.errors[-1:]])
    state = (done, report.spools if report else None, len(view.engines))
    return EvaluationProgress(done, solved, waits_for, bool(pending or queue.silence), state, failed)


def episodes(run: RunDir, config: RunConfig) -> int:
    """Count the episodes of a whole evaluation."""
    held_out = tasks.read(run.tasks)["eval"][: config.eval.tasks or None]
    return len(held_out) * len(config.eval.attempts)
