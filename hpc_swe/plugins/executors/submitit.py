"""Jobs by submitit. It submits and nothing more: the run folder is the truth, its results are not read."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hpc_swe.errors import ConfigError, CorruptRecord
from hpc_swe.plugins import Plugin
from hpc_swe.plugins.executors.base import Job
from hpc_swe.processes import descendants, start_time
from hpc_swe.records import Record, Role
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic


class JobRecord(Record, frozen=True, kw_only=True):
    """One submission, as it lies in launch/<role>/<job>.json."""

    role: Role
    job: str
    started: str
    """Start time of the process in clock ticks: a pid that comes back is not the same job."""
    submitted: float


class Submitit(Plugin, frozen=True, kw_only=True):
    """On this machine (`local`); Slurm takes the same calls."""

    cluster: Literal["local"] = "local"
    timeout_min: int = 60 * 24
    foreground: bool = False
    """Jobs end with the process that submitted them, by whatever signal that ends."""

    def submit(self, run: RunDir, role: Role, command: Sequence[str]) -> str:
        """Start one job; unless in the foreground it outlives this process."""
        import submitit

        folder = run.logs(role)
        folder.mkdir(parents=True, exist_ok=True)
        executor = submitit.LocalExecutor(folder=folder)
        executor.update_parameters(timeout_min=self.timeout_min, stderr_to_stdout=True)
        bound = ["--while", f"{os.getpid()}:{start_time(os.getpid())}"] if self.foreground else []
        job = executor.submit(subprocess.check_call, [*command, *bound])
        started = start_time(int(job.job_id))
        if started is None:
            raise ConfigError(f"job {job.job_id} of {role} ended at once; see {folder}")
        record = JobRecord(role=role, job=job.job_id, started=started, submitted=time.time())
        atomic.put(run.job(role, job.job_id), record)
        return str(job.job_id)

    def jobs(self, run: RunDir) -> list[Job]:
        """All submissions; one lives while its process does."""
        records = [record for path in sorted(run.launches.glob("*/*.json")) if (record := _read(path))]
        return [Job(r.role, r.job, r.submitted, start_time(int(r.job)) == r.started) for r in records]

    def cancel(self, run: RunDir, job: str) -> None:
        """Kill the job's process tree, children first, so that nothing starts again."""
        for pid in [int(job), *descendants(int(job))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _read(path: Path) -> JobRecord | None:
    try:
        return atomic.get(path, JobRecord)
    except (FileNotFoundError, CorruptRecord):
        return None
