"""Read what a run is doing: its folder, and one question to the scheduler."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from hpc_swe import job_counts
from hpc_swe.errors import SchedulerError
from hpc_swe.plugins.executors.base import Job
from hpc_swe.records import Endpoint, EndpointTable, Role, StatusReport
from hpc_swe.rundir import RunDir
from hpc_swe.runs import submit
from hpc_swe.settings import RunConfig
from hpc_swe.store import atomic, orders, submissions

ASK_S = 15.0


@dataclass(frozen=True)
class Queue:
    """What the scheduler and the ledger say of the run's jobs."""

    jobs: list[Job] = field(default_factory=list)
    silence: str = ""
    """Why there is no answer."""
    submitted_s: dict[Role, float] = field(default_factory=dict)
    """Seconds since the newest submission of a role."""
    failures: list[str] = field(default_factory=list)
    """What the last failed submissions said."""


@dataclass(frozen=True)
class RunView:
    """All that a screen shows."""

    name: str
    steps: int
    """0 when the run takes none."""
    desired: Mapping[Role, int]
    orders: Sequence[str]
    queue: Queue
    report: StatusReport | None = None
    silent_s: float = 0.0
    engines: Sequence[Endpoint] = ()


class RunReader:
    """Looks at a run; asks the scheduler, and reads what its jobs said, no more than every `ASK_S`."""

    def __init__(self, run: RunDir, config: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._config, self._clock = run, config, clock
        self._queue, self._asked_at = Queue(), float("-inf")

    def look(self) -> RunView:
        """The run as it stands."""
        run, config = self._run, self._config
        if self._clock() >= self._asked_at + ASK_S:
            self._queue, self._asked_at = _ask(run, config), self._clock()
        try:
            report = atomic.get(run.status, StatusReport)
            silent_s = time.time() - run.status.stat().st_mtime
            engines = atomic.get(run.endpoints, EndpointTable).endpoints
        except FileNotFoundError:
            report, silent_s, engines = None, 0.0, []
        view = RunView(
            name=run.root.name,
            steps=0 if config.mode == "eval" else config.steps,
            desired=job_counts.desired(config),
            orders=orders.active(run),
            queue=self._queue,
            report=report,
            silent_s=silent_s,
            engines=engines,
        )
        return _ended(view) if run.finished.exists() and not self._queue.jobs else view


def _ended(view: RunView) -> RunView:
    """A finished run of which no job is left: its last report was written while they lived."""
    nobody = dict.fromkeys(view.desired, 0)
    report = view.report and msgspec.structs.replace(view.report, roles=[], waits_for="", step_s=0.0)
    return replace(view, desired=nobody, report=report, engines=[])


def duration(seconds: float) -> str:
    """As people say it.

    Example:
        >>> duration(5400)
        '1 h 30 min'
    """
    minutes, hours, days = round(seconds / 60), seconds / 3600, seconds / 86400
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if hours < 36:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{days:.1f} days"


def _ask(run: RunDir, config: RunConfig) -> Queue:
    silence, jobs = "", []
    try:
        jobs = config.executor.queue(run)
    except SchedulerError as error:
        silence = f"the scheduler does not answer, so what waits is not known: {error}"
    running = Counter(job.role for job in jobs if job.state == "running")
    submitted, failures = {}, []
    for role, count in job_counts.desired(config).items():
        if running[role] >= count and run.status.exists():
            continue  # one file a job is read below
        history = submissions.history(run, role, submit.GENERATIONS)
        if history:
            submitted[role] = max(0.0, time.time() - history[-1][1].at)
        if running[role] < count and not silence:
            living = {job.submission for job in jobs if job.role == role}
            failures += _failure(run, role, submit.failures(history, None, living))
    return Queue(jobs, silence, submitted, failures)


def _failure(run: RunDir, role: Role, failed: Sequence[submit.History]) -> list[str]:
    """Of the last submission that came to nothing: what its jobs and their log say."""
    if not failed:
        return []
    number, submitted, started = failed[0]
    last = max(started, key=lambda job: job.seconds)
    rests = f", so tick rests {duration(submit.REST_S)}" if len(failed) >= submit.GENERATIONS else ""
    again = f"; {len(failed)} submissions running{rests}" if len(failed) > 1 else ""
    said = f"{role}: exit code {last.code} on {last.host} after {duration(last.seconds)}{again}"
    # a cluster's logs are named by the job, those of this machine by the submission
    names = [f"{submitted.job.partition(':')[0]}*", f"{number:06d}.log"]
    return [said, *_last_words(run, [path for name in names for path in run.logs(role).glob(name)])]


def _last_words(run: RunDir, logs: Sequence[Path]) -> list[str]:
    """The newest of a job's logs, and its last line."""
    found = [path for path in logs[:32] if path.stat().st_size]
    if not found:
        return []
    path = max(found, key=lambda path: path.stat().st_mtime)
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode("ascii", "replace").split("\n")
    words = [line.strip() for line in lines if line.strip()]
    return [f"{path.relative_to(run.root)}: {words[-1]}"] if words else []
