"""Record in launch/ what was submitted to the scheduler, and how each job started and ended.

Submission n of a role is taken by mkdir before the scheduler is asked, so two concurrent ticks make one
submission. A tick that dies before it confirms the job's id leaves its submission open. The next ticks find
its jobs in the queue and confirm it; or, when two ticks find none, they void it, and a job that starts later
reads that and ends. Only the newest submission of a role can be open: it is closed before another is taken.
"""

import logging
import re
import socket
import time
from dataclasses import dataclass

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.records import Record, Role
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic

DOUBTED, VOID = "doubted", "void"
NUMBER = re.compile("[0-9]{6}|[1-9][0-9]{6,8}")
GAP = 1000  # numbers grow one by one: a folder whose number is so far beyond the one before is not ours

log = logging.getLogger(__name__)


class Submitted(Record, frozen=True, kw_only=True):
    """Record a submission that the scheduler has accepted; this closes it."""

    job: str
    """The scheduler's id, without the index of an array task."""
    count: int
    host: str
    at: float
    """Seconds since the epoch on the clock of `host`."""


class Started(Record, frozen=True, kw_only=True):
    """Report one job from its node; the job writes it at its start, at each restart and at its end."""

    job: str
    host: str
    pid: int
    start_time: str
    """When the process started, in clock ticks: it tells a reused pid from the same job."""
    at: float
    """Seconds since the epoch on the clock of `host`, when this was written."""
    restarts: int = 0
    """Times that the scheduler has put the job back into the queue."""
    seconds: float = -1.0
    """Seconds that the job ran; negative while it runs."""
    code: int = 0
    """Exit code; while the job runs, that of the processes that it starts again, 0 before any failed."""

    @property
    def process(self) -> str:
        """Return the job's process, as the executor `local` names it."""
        return f"{self.pid}:{self.start_time}"


class Rest(Record, frozen=True, kw_only=True):
    """Say since when hosts have known that a role fails. No host uses the clock of another one."""

    number: int = 0
    """The newest submission; it has left the queue."""
    since: dict[str, float] = {}
    """Host -> its monotonic clock when a tick there found it gone; a smaller value follows a reboot."""


@dataclass(frozen=True)
class ConfirmedSubmission:
    """Hold a submission that the scheduler confirmed, and the reports of its jobs."""

    number: int
    note: Submitted
    started: list[Started]


@dataclass(frozen=True)
class LatestSubmission:
    """Describe the newest submission of a role; number 0 when there is none."""

    number: int = 0
    is_open: bool = False
    """It was taken, but neither confirmed nor voided."""
    is_doubted: bool = False
    """An earlier tick found it open and not in the queue."""
    voided: frozenset[int] = frozenset()
    """Submissions whose jobs must end at once if any start: others have taken their place."""


def newest(run: RunDir, role: Role) -> LatestSubmission:
    """Read the state of a role's newest submission."""
    names = _names(run, role)
    numbers = _numbers(names)
    if not numbers:
        return LatestSubmission()
    last = numbers[-1]
    is_open = f"{last:06d}.{VOID}" not in names and not run.submitted(role, last).exists()
    void_of = {name.removesuffix(f".{VOID}") for name in names if name.endswith(f".{VOID}")}
    voided = frozenset(int(name) for name in void_of if NUMBER.fullmatch(name))
    return LatestSubmission(last, is_open, is_open and f"{last:06d}.{DOUBTED}" in names, voided)


def _names(run: RunDir, role: Role) -> set[str]:
    try:
        return set(atomic.names(run.launches / role))
    except FileNotFoundError:
        return set()


def take(run: RunDir, role: Role, number: int) -> bool:
    """Take the next submission; return False when another tick has taken it."""
    try:
        with atomic.storage(run.launches / role):
            run.submission(role, number).mkdir()
    except FileExistsError:
        return False
    return True


def mark(run: RunDir, role: Role, number: int, kind: str) -> None:
    """Mark an open submission whose jobs are not in the queue as DOUBTED or, to close it, as VOID.

    If a job of a void submission starts later, it ends at once.
    """
    with atomic.storage(run.launches / role):
        run.marked(role, number, kind).mkdir(exist_ok=True)


def release(run: RunDir, role: Role, number: int) -> None:
    """Give a submission back that the scheduler refused."""
    with atomic.storage(run.launches / role):
        run.submission(role, number).rmdir()


def jobs(run: RunDir, role: Role) -> list[tuple[int, str]]:
    """List the number and the job id of every submission of a role, for an executor without a scheduler."""
    found = []
    for number in _numbers(_names(run, role)):
        submitted = _confirmed(run, role, number)
        reports = [] if submitted else _reports(run, role, number)
        found += [(number, submitted.job)] if submitted else [(number, report.process) for report in reports]
    return found


def history(run: RunDir, role: Role, last: int) -> list[ConfirmedSubmission]:
    """Return the confirmed ones of a role's `last` submissions, by number."""
    notes = {number: _confirmed(run, role, number) for number in _numbers(_names(run, role))[-last:]}
    return [ConfirmedSubmission(n, note, _reports(run, role, n)) for n, note in notes.items() if note]


def rested_s(run: RunDir, role: Role, number: int) -> float:
    """Return for how long this host has known that submission `number`, the newest, is gone, and note it."""
    host, now = socket.gethostname(), time.monotonic()
    try:
        rest = atomic.get(run.rest(role), Rest)
    except (FileNotFoundError, CorruptRecord):
        rest = Rest()
    since = rest.since if rest.number == number else {}
    if since.get(host, now + 1) > now:
        since = {**since, host: now}
        atomic.put(run.rest(role), Rest(number=number, since=since))
    return now - since[host]


def _numbers(names: set[str]) -> list[int]:
    found, last = [], 0
    for number in sorted(int(name) for name in names if NUMBER.fullmatch(name)):
        if number > last + GAP:
            log.warning("passed over submission %d: the one before it is %d", number, last)
            break
        found.append(number)
        last = number
    return [number for number in found if number]


def _confirmed(run: RunDir, role: Role, number: int) -> Submitted | None:
    try:
        return atomic.get(run.submitted(role, number), Submitted)
    except (FileNotFoundError, CorruptRecord):  # still open, or its tick died while writing
        return None


def _reports(run: RunDir, role: Role, number: int) -> list[Started]:
    found = []
    try:
        names = atomic.names(run.submission(role, number))
    except (FileNotFoundError, NotADirectoryError):  # released meanwhile, or a foreign file
        return []
    for name in names:
        if name != run.submitted(role, number).name:
            try:
                found.append(atomic.get(run.submission(role, number) / name, Started))
            except (CorruptRecord, FileNotFoundError) as error:  # its node died while writing
                log.warning("passed over: %s", error)
    return found
