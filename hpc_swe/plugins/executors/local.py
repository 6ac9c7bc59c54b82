"""Jobs as processes of this machine, started by submitit."""

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, get_args

from hpc_swe.errors import ConfigError
from hpc_swe.plugins import Plugin
from hpc_swe.plugins.executors.base import Job, Submission
from hpc_swe.processes import descendants, start_time
from hpc_swe.records import Role
from hpc_swe.rundir import RunDir
from hpc_swe.store import ledger

ENDING_S = 60.0

log = logging.getLogger(__name__)


class Local(Plugin, frozen=True, kw_only=True):
    """A job's id is its pid and start time, so that it cannot be mistaken."""

    is_here: ClassVar[bool] = True
    timeout_min: int = 60 * 24
    foreground: bool = False
    """Jobs end with the process that submitted them, by whatever signal that ends."""
    pause_s: float = 0.5
    array_size: Literal[1] = 1

    def check(self, submission: Submission) -> None:
        """This machine takes whatever it is given."""

    def script(self, run: RunDir, submission: Submission) -> str:
        """The command line."""
        return shlex.join(self._command(submission))

    def submit(self, run: RunDir, submission: Submission) -> str:
        """Start the job; unless in the foreground it outlives this process."""
        import submitit

        folder = run.logs(submission.role)
        folder.mkdir(parents=True, exist_ok=True)
        executor = submitit.LocalExecutor(folder=folder)
        executor.update_parameters(timeout_min=self.timeout_min, stderr_to_stdout=True)
        job = executor.submit(subprocess.check_call, self._command(submission))
        started = start_time(int(job.job_id))
        if started is None:
            raise ConfigError(f"job {job.job_id} of {submission.role} ended at once; see {folder}")
        return f"{job.job_id}:{started}"

    def queue(self, run: RunDir) -> list[Job]:
        """The jobs whose processes live."""
        return [
            Job(role, job, number, "running")
            for role in get_args(Role)
            for number, job in ledger.jobs(run, role)
            if _is_alive(job)
        ]

    def endings(self, jobs: Sequence[str]) -> None:
        """Nobody keeps a book here."""

    def cancel(self, jobs: Sequence[str]) -> None:
        """Kill each job's process tree, and wait for its end: on a busy machine a killed process lives on."""
        roots = [_pid(job) for job in jobs if _is_alive(job)]
        born: dict[int, str | None] = {}
        # stopped first: between a look and a kill they could have more children, who then have no parent
        while new := {pid for root in roots for pid in (root, *descendants(root))} - born.keys():
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

    def _command(self, submission: Submission) -> list[str]:
        bound = ["--while", f"{os.getpid()}:{start_time(os.getpid())}"] if self.foreground else []
        return [*submission.command, *bound]


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _pid(job: str) -> int:
    return int(job.partition(":")[0])


def _is_alive(job: str) -> bool:
    return start_time(_pid(job)) == job.partition(":")[2]
