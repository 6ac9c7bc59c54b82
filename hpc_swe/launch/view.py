"""Read the state of a run from its folder and from one request to the scheduler."""

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from hpc_swe.base.errors import HpcSweError, SchedulerError
from hpc_swe.base.records import Endpoint, EndpointTable, Role, StatusReport
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders, orders, stop_signs, submissions, supervision
from hpc_swe.base.store.submissions import ConfirmedSubmission
from hpc_swe.cluster.executors.base import Job
from hpc_swe.config import job_counts
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import submit

ASK_S = 15.0  # least seconds between two requests to the scheduler
FEW = 16  # jobs of a role whose notes are read, one file each, also while all of them run
NOTE = re.compile(r"^.* (?:start again|gave up after)\b.*$", re.MULTILINE)
"""What jobs.run writes below the last words of processes that ended."""


@dataclass(frozen=True)
class Queue:
    """Hold what the scheduler and launch/ report about the run's jobs."""

    jobs: list[Job] = field(default_factory=list)
    silence: str = ""
    """Reason why the scheduler gave no answer; empty when it did."""
    submitted_s: dict[Role, float] = field(default_factory=dict)
    """Seconds since the newest submission of a role."""
    failures: list[str] = field(default_factory=list)
    """Last failed submissions, with the last line of their log."""


@dataclass(frozen=True)
class RunView:
    """Hold the state of a run at one time, as screens and bars show it."""

    name: str
    steps: int
    """Training steps of the whole run; 0 in an evaluation."""
    desired: Mapping[Role, int]
    orders: Sequence[str]
    queue: Queue
    report: StatusReport | None = None
    silent_s: float = 0.0
    engines: Sequence[Endpoint] = ()
    ended: str = ""
    """The sign that ended the run early; empty when none did."""
    stuck: str = ""
    """The part that made no progress, and what was done about it; empty since the run has progressed."""


class RunReader:
    """Read a run; ask the scheduler, and read the notes of its jobs, at most every `ASK_S`."""

    def __init__(self, run: RunDir, config: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._config, self._clock = run, config, clock
        self._queue, self._asked_at = Queue(), float("-inf")
        self._seen: tuple[int, float] | None = None
        """Number of the last report, and when it was new on this process's clock."""

    def look(self) -> RunView:
        run, config = self._run, self._config
        if self._clock() >= self._asked_at + ASK_S:
            self._queue, self._asked_at = _ask(run, config), self._clock()
        try:
            report = atomic.get(run.status, StatusReport)
            silent_s = self._silent_s(report.beat, run.status.stat().st_mtime)
            engines = atomic.get(run.endpoints, EndpointTable).endpoints
        except FileNotFoundError:
            report, silent_s, engines = None, 0.0, []
        desired, standing = job_counts.desired(config), orders.active(run) if run.control.exists() else []
        if run.finished.exists() and not self._queue.jobs:  # the last report describes live processes
            desired, engines = dict.fromkeys(desired, 0), []
            report = report and msgspec.structs.replace(report, roles=[], waits_for="", step_s=0.0)
        return RunView(
            name=run.root.name,
            steps=0 if config.mode == "eval" else config.steps,
            desired=desired,
            orders=standing,
            queue=self._queue,
            report=report,
            silent_s=silent_s,
            engines=engines,
            ended=stop_signs.read(run).reason,
            stuck="" if run.finished.exists() else supervision.read(run).message(config.max_restarts),
        )

    def look_twice(self) -> RunView:
        """Return the present state; if a report seems old, wait for the next one, since clocks may differ."""
        view, until = self.look(), self._clock() + 2 * self._config.status_s
        jobs, unknown = [job.role for job in view.queue.jobs if job.state == "running"], view.queue.silence
        may_live = not view.orders and (unknown or "coordinator" in jobs)
        while may_live and view.silent_s > ASK_S and self._clock() < until:
            time.sleep(0.25)
            view = self.look()
        return view

    def _silent_s(self, number: int, written_at: float) -> float:
        """Return for how long a report has been the last: as this process saw, and at first as clocks say.

        The file's time is that of a server or of the coordinator's node, which may be ahead, too.
        """
        now = self._clock()
        if self._seen is None:
            self._seen = number, now - abs(time.time() - written_at)
        elif self._seen[0] != number:
            self._seen = number, now
        return now - self._seen[1]

    def read(self) -> RunView | str:
        """Return the present state, or why it cannot be read now, such as a file that is being replaced."""
        try:
            return self.look()
        except (HpcSweError, OSError) as error:
            return str(error)


def duration(seconds: float) -> str:
    """Format seconds for people.

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
        silence = f"the scheduler does not answer, so waiting jobs are not known: {error}"
    running = Counter(job.role for job in jobs if job.state == "running")
    submitted, failures = {}, []
    for role, count in job_counts.desired(config).items():
        if running[role] >= count > FEW and run.status.exists():
            continue
        history = submissions.history(run, role, submit.GENERATIONS)
        if history:
            submitted[role] = max(0.0, time.time() - history[-1].note.at)
        if not silence:
            living = {job.submission for job in jobs if job.role == role}
            failed = submit.failures(history, None, living) if running[role] < count else []
            failures += _failure(run, role, failed, submit.generations(run, config)) or _failure(
                run, role, _failing([each for each in history if each.number in living])[:1]
            )
    if shutil.disk_usage(run.root).free < folders.SMALL:  # then nobody can report anything
        failures.append(f"{run.root}: no space is left; free some")
    return Queue(jobs, silence, submitted, failures)


def failing(run: RunDir, config: RunConfig) -> list[str]:
    """Say of the newest jobs of each role how they failed, also those that start their processes again."""
    found = []
    for role, count in job_counts.desired(config).items():
        newest = count if config.executor.is_here else 1  # an array of a cluster is one submission
        for each in _failing(submissions.history(run, role, newest) if 0 < count <= FEW else []):
            found.append(": ".join(_failure(run, role, [each])))
    return found


def _failing(history: Sequence[ConfirmedSubmission]) -> list[ConfirmedSubmission]:
    """Return the submissions with a job that reported a failure lately, newest first."""
    lately = time.time() - submit.REST_S
    return [each for each in reversed(history) if any(job.code and job.at > lately for job in each.started)]


def _failure(
    run: RunDir, role: Role, failed: Sequence[ConfirmedSubmission], needed: int = submit.GENERATIONS
) -> list[str]:
    """Describe the last failed submission: exit code, host, and the last words in its log."""
    if not failed:
        return []
    started, said = failed[0].started, _last_words(run, role, failed[0])
    if not started and not said:
        return []  # such as jobs that were cancelled while they waited
    again = f"; {len(failed)} submissions running" if len(failed) > 1 else ""
    if len(failed) >= needed:
        again += f", so ticks rest {duration(submit.REST_S)} after each"
    how = "no job reported its start"
    if started:
        last = max(started, key=lambda job: (job.code != 0, job.at))
        then = f"after {duration(last.seconds)}" if last.seconds >= 0 else "and starts again"
        how = f"exit code {last.code} on {last.host} {then}"
    return [f"{role}: {how}{again}", *said]


def _last_words(run: RunDir, role: Role, submission: ConfirmedSubmission) -> list[str]:
    """Return the name of a job's newest log, and its last error, else the last line, before a restart."""
    # logs of a cluster are named by the job, logs of this machine by the submission
    names = [f"{submission.note.job.partition(':')[0]}*", f"{submission.number:06d}.log"]
    logs = [path for name in names for path in run.logs(role).glob(name)]
    found = [path for path in logs[:32] if path.stat().st_size]
    if not found:
        return []
    path = max(found, key=lambda path: path.stat().st_mtime)
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 14)))
        parts = NOTE.split(file.read().decode("ascii", "replace"))
    if len(parts) > 1 and (any(job.seconds < 0 for job in submission.started) or not parts[-1].strip()):
        parts.pop()  # what the next start says, or nothing
    texts = [line.strip() for line in parts[-1].split("\n") if line.strip()]
    errors = [line for line in texts if " ERROR " in line]
    return [f"{path.relative_to(run.root)}: {text}" for text in (errors or texts)[-1:]]
