"""launch/: what was submitted, and what came of it.

Submission n of a role is taken by mkdir before the scheduler is asked, so two ticks at once make one. A tick
that dies before it noted the job's id leaves its submission open. The next ticks find its jobs in the queue
and note them; or, when two looks find none, they void it, and a job that turns up late reads that and ends.
Only the newest submission of a role can be open: no other is taken before it is closed.
"""

import logging
import re
from dataclasses import dataclass

from hpc_swe.errors import CorruptRecord
from hpc_swe.records import Record, Role
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic

DOUBTED, VOID = "doubted", "void"
NUMBER = re.compile("[0-9]{6}|[1-9][0-9]{6,8}")
GAP = 1000  # submissions are counted one by one: a number so far beyond the one before it is no submission's

log = logging.getLogger(__name__)


class Submitted(Record, frozen=True, kw_only=True):
    """A submission that the scheduler has accepted."""

    job: str
    """The scheduler's id; of an array, without the index."""
    count: int
    host: str
    at: float
    """Seconds since the epoch on the clock of `host`."""


class Started(Record, frozen=True, kw_only=True):
    """One job on its node, as it says itself; written at its start and again at its end."""

    job: str
    host: str
    pid: int
    start_time: str
    """In clock ticks: a pid that comes back is not the same job."""
    at: float
    """Seconds since the epoch on the clock of `host`, when this was written."""
    restarts: int = 0
    """Times that the scheduler has put it back into the queue."""
    seconds: float = -1.0
    """How long it ran; negative while it does."""
    code: int = 0

    @property
    def process(self) -> str:
        """Its process, as the executor `local` names it."""
        return f"{self.pid}:{self.start_time}"


@dataclass(frozen=True)
class Entry:
    """The newest submission of a role."""

    number: int = 0
    is_open: bool = False
    """Taken, but neither noted nor voided."""
    is_doubted: bool = False
    """An earlier look found it open and not in the queue."""
    voided: frozenset[int] = frozenset()
    """Submissions whose jobs, if any turn up, have nothing to do: others have taken their place."""


def newest(run: RunDir, role: Role) -> Entry:
    """The last submission of a role; number 0 when there was none."""
    names = set(atomic.names(run.launches / role))
    numbers = _numbers(names)
    if not numbers:
        return Entry()
    last = numbers[-1]
    is_open = f"{last:06d}.{VOID}" not in names and not run.submitted(role, last).exists()
    void_of = {name.removesuffix(f".{VOID}") for name in names if name.endswith(f".{VOID}")}
    voided = frozenset(int(name) for name in void_of if NUMBER.fullmatch(name))
    return Entry(last, is_open, is_open and f"{last:06d}.{DOUBTED}" in names, voided)


def take(run: RunDir, role: Role, number: int) -> bool:
    """Take a submission; False when another tick has it."""
    try:
        with atomic.storage(run.launches / role):
            run.submission(role, number).mkdir()
    except FileExistsError:
        return False
    return True


def note(run: RunDir, role: Role, number: int, submitted: Submitted) -> None:
    """Close a submission: the scheduler has it."""
    atomic.put(run.submitted(role, number), submitted)


def doubt(run: RunDir, role: Role, number: int) -> None:
    """Mark an open submission that the queue does not show."""
    _mark(run, role, number, DOUBTED)


def release(run: RunDir, role: Role, number: int) -> None:
    """Give a submission back that the scheduler refused."""
    with atomic.storage(run.launches / role):
        run.submission(role, number).rmdir()


def void(run: RunDir, role: Role, number: int) -> None:
    """Close a submission whose tick died; its jobs, should there be any, end at once."""
    _mark(run, role, number, VOID)


def is_void(run: RunDir, role: Role, number: int) -> bool:
    """Whether a job of this submission has nothing to do."""
    return run.marked(role, number, VOID).exists()


def show(run: RunDir, role: Role, number: int, index: int, started: Started) -> None:
    """What a job says of itself."""
    atomic.put(run.started(role, number, index), started)


def jobs(run: RunDir, role: Role) -> list[tuple[int, str]]:
    """Number and id of every submission of one job, for an executor without a scheduler that could tell."""
    found = []
    for number in _numbers(set(atomic.names(run.launches / role))):
        noted = _noted(run, role, number)
        found += [(number, noted.job)] if noted else [(number, s.process) for s in _said(run, role, number)]
    return found


def history(run: RunDir, role: Role, last: int) -> list[tuple[int, Submitted, list[Started]]]:
    """The last noted submissions with what their jobs said, oldest first."""
    numbers = _numbers(set(atomic.names(run.launches / role)))[-last:]
    return [(n, noted, _said(run, role, n)) for n in numbers if (noted := _noted(run, role, n))]


def _numbers(names: set[str]) -> list[int]:
    found, last = [], 0
    for number in sorted(int(name) for name in names if NUMBER.fullmatch(name)):
        if number > last + GAP:
            log.warning("passed over submission %d: the one before it is %d", number, last)
            break
        found.append(number)
        last = number
    return [number for number in found if number]


def _mark(run: RunDir, role: Role, number: int, mark: str) -> None:
    with atomic.storage(run.launches / role):
        run.marked(role, number, mark).mkdir(exist_ok=True)


def _noted(run: RunDir, role: Role, number: int) -> Submitted | None:
    try:
        return atomic.get(run.submitted(role, number), Submitted)
    except (FileNotFoundError, CorruptRecord):  # open, or of a tick that died in the write
        return None


def _said(run: RunDir, role: Role, number: int) -> list[Started]:
    found = []
    try:
        names = atomic.names(run.submission(role, number))
    except (FileNotFoundError, NotADirectoryError):  # given back meanwhile, or somebody else's
        return []
    for name in names:
        if name != run.submitted(role, number).name:
            try:
                found.append(atomic.get(run.submission(role, number) / name, Started))
            except (CorruptRecord, FileNotFoundError) as error:  # of a node that died in the write
                log.warning("passed over: %s", error)
    return found
