"""Run jobs as processes of this machine.

A job's id is its pid and start time, so that a reused pid is never mistaken for it. Every process of a job
carries the job's mark in its environment. The mark finds the processes that a job leaves behind when its
first process is killed, and the GPUs that other jobs have.
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
from typing import Annotated, ClassVar, get_args

from msgspec import Meta

from hpc_swe.base.errors import ConfigError, SchedulerError
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Role
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import submissions
from hpc_swe.cluster.executors.base import (
    FOREGROUND,
    MARK,
    Executor,
    GpuGrant,
    Job,
    Submission,
    check_environ,
    check_runtime,
    job_script,
    log_name,
)
from hpc_swe.cluster.gpus import VISIBLE, choose, memory_gib, usable
from hpc_swe.cluster.processes import (
    await_stop,
    descendants,
    is_stopped,
    leader,
    start_time,
    variable,
    with_variable,
)

END_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0  # a process in vfork stops only when its stopped child has ended
LOCK_TIMEOUT_S = 60.0
GPUS = "HPC_SWE_GPUS"

log = logging.getLogger(__name__)


class Local(Plugin, Executor, frozen=True, kw_only=True):
    """Start one process of this machine per job; it outlives the command that started it."""

    is_here: ClassVar[bool] = True
    pause_s: ClassVar[float] = 0.5
    array_size: ClassVar[int] = 1
    gpus: dict[Role, Annotated[int, Meta(ge=0)]] = {}
    """GPUs of each job of a role, for example {learner = 1, inference = 1}. No other role sees a GPU."""
    share_gpus: bool = False
    """Give the same GPU to several jobs. Without it no two jobs of this machine's runs share a GPU."""
    setup: list[str] = []
    """Lines of bash that each job runs first."""
    runtime: str = ""
    """File of containers/build_runtime.sh, from which jobs run; empty: from the environment of the start."""
    environ: dict[str, str] = {}
    """Environment variables of each job. Never a secret: the run folder stores them."""

    def __post_init__(self) -> None:
        check_environ(self.environ)

    def check(self, submission: Submission) -> None:
        """Check that this machine has as many GPUs as the submission asks for."""
        check_runtime(self.runtime)
        asked = self.gpus.get(submission.role, 0)
        available = usable(submission.environment) if asked else []
        needed = asked if self.share_gpus else asked * submission.count
        if needed > len(available):
            raise ConfigError(
                f"[executor] gpus.{submission.role} = {asked} for {submission.count} jobs, but this machine "
                f"has {len(available)} GPUs; lower it or counts.{submission.role}{_or_share(len(available))}"
            )

    def check_machine(self, jobs: Mapping[Role, int], environment: Mapping[str, str]) -> None:
        """Check that this machine has the GPUs of all jobs together, unless they share GPUs."""
        asked = sum(self.gpus.get(role, 0) * count for role, count in jobs.items())
        here = len(usable(environment)) if asked and not self.share_gpus else asked
        if asked > here:
            raise ConfigError(
                f"[executor] gpus asks for {asked} GPUs in all, this machine has {here}; ask for "
                f"fewer{_or_share(here)}"
            )

    def gpu_grant(self, role: Role) -> GpuGrant:
        count = self.gpus.get(role, 0)
        return GpuGrant(count, f"gpus.{role} = {count}", memory_gib() if count else 0.0)

    def script(self, run: RunDir, submission: Submission) -> str:
        bound = ["--while", _id(os.getpid())] if FOREGROUND in os.environ else []
        return "\n".join(job_script(submission, self.setup, self.environ, bound, self.runtime))

    def submit(self, run: RunDir, submission: Submission) -> str:
        """Start the job; unless FOREGROUND is set it outlives this process."""
        folder = run.logs(submission.role)
        folder.mkdir(parents=True, exist_ok=True)
        asked, mark = self.gpus.get(submission.role, 0), f"{submission.role}:{submission.number}:{run.root}"
        with (
            (folder / f"{log_name(mark)}.log").open("ab") as output,
            _gpu_lock() if asked else contextlib.nullcontext(),
        ):
            gpus = self._choose_gpus(submission, asked) if asked else ""
            place = {MARK: mark, GPUS: gpus, VISIBLE: gpus}
            job = subprocess.Popen(
                ["bash", "-c", self.script(run, submission)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # neither Ctrl-C nor a closed terminal may end it
                env=os.environ | place,
            )
        started = start_time(job.pid)
        if started is None:
            raise ConfigError(f"job {job.pid} of {submission.role} ended at once; see {folder}")
        return f"{job.pid}:{started}"

    def queue(self, run: RunDir) -> list[Job]:
        """List jobs whose first process is alive, and as broken the processes that dead jobs left behind."""
        processes = _processes(run)
        found = []
        for role in get_args(Role):
            recorded = dict(submissions.jobs(run, role))
            for number in recorded.keys() | {each for of, each in processes if of == role}:
                pids = processes.get((role, number), [])
                if number not in recorded:  # its tick died or will record it soon; a job has no older process
                    oldest = min(pids, key=lambda pid: (int(start_time(pid) or sys.maxsize), pid))
                    found.append(Job(role, _id(oldest), number, "running"))
                elif _is_alive(recorded[number]):
                    found.append(Job(role, recorded[number], number, "running"))
                else:
                    left = [pid for pid in pids if not _has_live_leader(pid)]
                    found += [Job(role, _id(pid), number, "broken", "left behind") for pid in left]
        return found

    def endings(self, jobs: Sequence[str]) -> None:
        """Return None: a machine without a scheduler has no accounting."""

    def cancel(self, jobs: Sequence[str]) -> None:
        """Kill each job's processes, and wait for their end, which takes a while on a busy machine."""
        roots = [_pid(job) for job in jobs if _is_alive(job)]
        marks = {variable(pid, MARK) for pid in roots if leader(pid) == pid} - {None}
        started: dict[int, str | None] = {}
        # Stopped first: between listing and killing, a process could start children that then have no parent.
        while new := _trees(roots, marks) - started.keys():
            started |= {pid: start_time(pid) for pid in new}
            _signal(new, signal.SIGSTOP)
            await_stop(new, STOP_TIMEOUT_S)
        _signal(started, signal.SIGKILL)
        deadline = time.monotonic() + END_TIMEOUT_S
        while left := [pid for pid, since in started.items() if since and start_time(pid) == since]:
            if time.monotonic() > deadline:
                log.warning("stuck: processes %s do not end, though they were killed", left)
                return
            time.sleep(0.02)

    def requeue(self) -> None:
        """Do nothing: the next tick starts the job again."""

    def _choose_gpus(self, submission: Submission, asked: int) -> str:
        available = usable(submission.environment)
        jobs = {mark: gpus for pid, mark in with_variable(MARK).items() if (gpus := variable(pid, GPUS))}
        taken = [gpu for gpus in jobs.values() for gpu in gpus.split(",")]  # of whichever run
        chosen = choose(available, taken, asked, share=self.share_gpus)
        if chosen is None:
            raise ConfigError(
                f"[executor] gpus.{submission.role} = {asked}: this machine has {len(available)} GPUs "
                f"to give, of which jobs have {len(set(taken) & set(available))}; set share_gpus = true, "
                "or ask for fewer"
            )
        return ",".join(chosen)


@contextlib.contextmanager
def _gpu_lock() -> Iterator[None]:
    """Let one process of this user assign GPUs at a time; the lock ends with the process that holds it."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        while True:
            try:
                name.bind(f"\0hpc_swe-gpus-{os.getuid()}")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise SchedulerError(
                        f"another process of this user has been assigning GPUs for over {LOCK_TIMEOUT_S:g} s"
                    ) from None
                time.sleep(0.05)
        yield


def _processes(run: RunDir) -> dict[tuple[str, int], list[int]]:
    """Return the live processes of the run's jobs by role and submission, found by their inherited mark."""
    found: dict[tuple[str, int], list[int]] = {}
    for pid, mark in with_variable(MARK).items():
        role, number, root = mark.split(":", 2)
        if root == str(run.root):
            found.setdefault((role, int(number)), []).append(pid)
    return found


def _trees(roots: Iterable[int], marks: Collection[str | None]) -> set[int]:
    """Return some processes with all their descendants, and those that carry one of the marks."""
    marked = [pid for pid, mark in with_variable(MARK).items() if mark in marks] if marks else []
    return {*marked, *(pid for root in roots for pid in (root, *descendants(root)))}


def _has_live_leader(pid: int) -> bool:
    """Return whether a live leader of the process group will end the process, as an engine's guard does."""
    return not is_stopped(pid) and start_time(leader(pid)) is not None and not is_stopped(leader(pid))


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _or_share(available: int) -> str:
    return ", or set share_gpus = true" if available else ""


def _id(pid: int) -> str:
    return f"{pid}:{start_time(pid)}"


def _pid(job: str) -> int:
    return int(job.partition(":")[0])


def _is_alive(job: str) -> bool:
    return start_time(_pid(job)) == job.partition(":")[2]
