"""Jobs as processes of this machine.

A job's id is its pid and start time, so that it cannot be mistaken. Every process of a job has the job's mark
in its environment: so leftovers of a job whose first process was killed are found, and so are the GPUs that
other jobs have.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, get_args

from msgspec import Meta

from hpc_swe.errors import ConfigError, SchedulerError
from hpc_swe.plugins import Plugin
from hpc_swe.plugins.executors import _gpus
from hpc_swe.plugins.executors.base import Job, Submission, require_environ, shell
from hpc_swe.processes import descendants, is_stopped, leader, start_time, variable, with_variable
from hpc_swe.records import Role
from hpc_swe.rundir import RunDir
from hpc_swe.store import submissions

ENDING_S = 60.0
LOCK_S = 60.0
MARK, GPUS = "HPC_SWE_JOB", "HPC_SWE_GPUS"

log = logging.getLogger(__name__)


class Local(Plugin, frozen=True, kw_only=True):
    """One process of this machine a job; it outlives the command that started it."""

    is_here: ClassVar[bool] = True
    gpus: dict[Role, Annotated[int, Meta(ge=0)]] = {}
    """GPUs of each job of a role, for example {learner = 1, inference = 1}. No other role sees a GPU."""
    share_gpus: bool = False
    """Hand the same GPU to several jobs. Without it no two jobs of this machine's runs have one in common."""
    setup: list[str] = []
    """Lines of bash that each job runs first."""
    environ: dict[str, str] = {}
    """Environment variables of each job. Never a secret: the run folder keeps them."""
    foreground: bool = False
    """Jobs end with the process that submitted them, by whatever signal that ends."""
    pause_s: float = 0.5
    """Seconds between two looks of a command that waits for the run."""
    array_size: Literal[1] = 1
    """Jobs of one submission: one."""

    def __post_init__(self) -> None:
        require_environ(self.environ)

    def check(self, submission: Submission) -> None:
        """Refuse more GPUs than this machine has."""
        asked = self.gpus.get(submission.role, 0)
        here = self.here(submission.environment) if asked else []
        each = asked if self.share_gpus else asked * submission.count
        if each > len(here):
            raise ConfigError(
                f"[executor] gpus.{submission.role} = {asked} for {submission.count} jobs, but this machine "
                f"has {len(here)} GPUs; lower it or counts.{submission.role}, or set share_gpus = true"
            )

    def here(self, environment: Mapping[str, str]) -> list[str]:
        """The GPUs that jobs may be given, for the environment of the start."""
        return _gpus.usable(environment)

    def script(self, run: RunDir, submission: Submission) -> str:
        """What bash is given."""
        lines = shell(submission, self.setup, self.environ, self._bound())
        return "\n".join(lines)

    def submit(self, run: RunDir, submission: Submission) -> str:
        """Start the job; unless in the foreground it outlives this process."""
        folder = run.logs(submission.role)
        folder.mkdir(parents=True, exist_ok=True)
        asked, mark = self.gpus.get(submission.role, 0), _mark(run, submission.role, submission.number)
        with (
            (folder / f"{log_name(mark)}.log").open("ab") as output,
            _alone() if asked else contextlib.nullcontext(),
        ):
            gpus = self._hand_out(submission, asked) if asked else ""
            place = {MARK: mark, GPUS: gpus, _gpus.VISIBLE: gpus}
            job = subprocess.Popen(
                ["bash", "-c", self.script(run, submission)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # neither Ctrl-C nor the end of a terminal is meant for it
                env=os.environ | place,
            )
        started = start_time(job.pid)
        if started is None:
            raise ConfigError(f"job {job.pid} of {submission.role} ended at once; see {folder}")
        return f"{job.pid}:{started}"

    def queue(self, run: RunDir) -> list[Job]:
        """The jobs whose first process lives; as broken, what dead ones have left behind."""
        bearers = _bearers(run)
        found = []
        for role in get_args(Role):
            noted = dict(submissions.jobs(run, role))
            for number in noted.keys() | {each for of, each in bearers if of == role}:
                processes = bearers.get((role, number), [])
                if (
                    number not in noted
                ):  # its tick has died, or is about to note it; jobs have no older process
                    found.append(Job(role, _id(min(processes, key=_age)), number, "running"))
                elif _is_alive(noted[number]):
                    found.append(Job(role, noted[number], number, "running"))
                else:
                    left = [pid for pid in processes if not _is_cared_for(pid)]
                    found += [Job(role, _id(pid), number, "broken", "left behind") for pid in left]
        return found

    def endings(self, jobs: Sequence[str]) -> None:
        """Nobody keeps a book here."""

    def cancel(self, jobs: Sequence[str]) -> None:
        """Kill each job's processes, and wait for their end: on a busy machine a killed process lives on."""
        roots = [_pid(job) for job in jobs if _is_alive(job)]
        marks = {variable(pid, MARK) for pid in roots if leader(pid) == pid} - {None}
        born: dict[int, str | None] = {}
        # stopped first: between a look and a kill they could have more children, who then have no parent
        while new := {*_trees(roots), *_with_marks(marks)} - born.keys():
            born |= {pid: start_time(pid) for pid in new}
            _signal(new, signal.SIGSTOP)
        _signal(born, signal.SIGKILL)
        deadline = time.monotonic() + ENDING_S
        while left := [pid for pid, since in born.items() if since and start_time(pid) == since]:
            if time.monotonic() > deadline:
                log.warning("stuck: processes %s do not end, though they were killed", left)
                return
            time.sleep(0.02)

    def requeue(self) -> None:
        """`tick` starts it again."""

    def _bound(self) -> list[str]:
        return ["--while", _id(os.getpid())] if self.foreground else []

    def _hand_out(self, submission: Submission, asked: int) -> str:
        here = self.here(submission.environment)
        taken = [gpu for gpus in _handed_out().values() for gpu in gpus.split(",")]
        chosen = _gpus.choose(here, taken, asked, share=self.share_gpus)
        if chosen is None:
            raise ConfigError(
                f"[executor] gpus.{submission.role} = {asked}: this machine has {len(here)} GPUs to give, of "
                f"which jobs have {len(set(taken) & set(here))}; set share_gpus = true, or ask for fewer"
            )
        return ",".join(chosen)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Only one process of this user hands out GPUs at a time; the name is free as soon as that one has ended.

    Raises:
        SchedulerError: Another one takes too long.
    """
    deadline = time.monotonic() + LOCK_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        while True:
            try:
                name.bind(f"\0hpc_swe-gpus-{os.getuid()}")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise SchedulerError(f"another process hands out GPUs for over {LOCK_S:g} s") from None
                time.sleep(0.05)
        yield


def log_name(mark: str) -> str:
    """What a job's log is called, without its suffix."""
    return f"{int(mark.split(':', 2)[1]):06d}"


def _mark(run: RunDir, role: Role, number: int) -> str:
    return f"{role}:{number}:{run.root}"


def _bearers(run: RunDir) -> dict[tuple[str, int], list[int]]:
    """The living processes of each of the run's jobs, by the mark that they inherit."""
    found: dict[tuple[str, int], list[int]] = {}
    for pid, mark in with_variable(MARK).items():
        role, number, root = mark.split(":", 2)
        if root == str(run.root):
            found.setdefault((role, int(number)), []).append(pid)
    return found


def _handed_out() -> dict[str, str]:
    """Mark -> the GPUs of a job of this machine, of whichever run."""
    return {mark: gpus for pid, mark in with_variable(MARK).items() if (gpus := variable(pid, GPUS))}


def _with_marks(marks: Collection[str | None]) -> list[int]:
    return [pid for pid, mark in with_variable(MARK).items() if mark in marks] if marks else []


def _trees(roots: Iterable[int]) -> Iterator[int]:
    for root in roots:
        yield from (root, *descendants(root))


def _is_cared_for(pid: int) -> bool:
    """Whether the process group has a leader at work, which ends it: an engine's guard tidies up after it."""
    return not is_stopped(pid) and start_time(leader(pid)) is not None and not is_stopped(leader(pid))


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _id(pid: int) -> str:
    return f"{pid}:{start_time(pid)}"


def _age(pid: int) -> tuple[int, int]:
    return int(start_time(pid) or sys.maxsize), pid


def _pid(job: str) -> int:
    return int(job.partition(":")[0])


def _is_alive(job: str) -> bool:
    return start_time(_pid(job)) == job.partition(":")[2]
