"""Define an executor: it submits, lists and cancels jobs. What a job achieves is read in the run folder."""

import os
import re
import shlex
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Role
from hpc_swe.base.rundir import RunDir

SINGLETON_ROLES: tuple[Role, ...] = ("coordinator", "learner")  # roles of which a run has at most one job
LEARNER_PROCESSES = (
    "policy.tensor_parallel * policy.pipeline_parallel * policy.context_parallel * learner.data_parallel"
)
"""The product of keys that counts a learner's processes."""
JOB_VARIABLES = (
    *("SLURM_", "SLURMD_", "SRUN_", "SBATCH_CPU_BIND", "SBATCH_MEM_BIND"),
    *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)
"""Names, or prefixes of names, of the variables in which a scheduler passes one job its resources."""
KEPT = (
    *("PATH", "LD_", "PYTHONPATH", "TMPDIR", "XDG_CACHE_HOME", "LIBRARY_PATH", "CPATH", "CC", "CXX"),
    *("MODULE", "LOADEDMODULES", "_LMFILES_", "LMOD_", "APPTAINER_", "SINGULARITY_", "HF_", "OMP_", "MKL_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "NVSHMEM_", "UCX_", "FI_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_"),
)
"""Prefixes of the variables that a run keeps for its jobs; a tick of cron has none of them."""
RUNTIME = "hpc_swe/cluster/executors/runtime.sh"
MARK = "HPC_SWE_JOB"  # what all processes of a job of this machine inherit: role, submission and run folder
INTERPRETER = "HPC_SWE_PYTHON"
"""The variable that names the Python of jobs; a start sets it, and the scripts in sbatch/ obey it."""
FOREGROUND = "HPC_SWE_FOREGROUND"
"""A command that sets this variable has jobs of this machine end with it, whatever signal ends it."""
SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|USERNAME|(^|_)(API)?KEYS?(_|$)|(^|_)AUTH(_|$)"
)


@dataclass(frozen=True)
class Submission:
    """Describe the jobs of one role that are submitted together."""

    run_id: str
    role: Role
    number: int
    """Number of this submission among those of its role in the run, from 1."""
    count: int
    """Number of jobs, which form one array."""
    processes: int
    """Processes of each job, over all its nodes."""
    command: Sequence[str]
    """Command of each job: `python -m jobs.run ...`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the command that started the run; a tick that cron runs does not have them."""
    code: str = ""
    """Folder of the packages that jobs import."""


@dataclass(frozen=True)
class Job:
    """Describe one job that the scheduler knows and that has not ended."""

    role: Role
    job: str
    submission: int
    state: Literal["running", "waiting", "held", "broken"]
    """A held job waits for a person; a broken one will never start."""
    reason: str = ""
    """Why the job waits, in the scheduler's words."""


@dataclass(frozen=True)
class ResourceRequest:
    """Describe what all jobs of one role ask of the scheduler together, for one walltime."""

    role: Role
    jobs: int
    nodes: int
    cores: int
    memory_gb: float
    gpus: int
    hours: float


@dataclass(frozen=True)
class GpuGrant:
    """Describe the GPUs that an executor gives each job of a role."""

    count: int
    key: str
    """Key of [executor] that gives them, and its value."""
    gib: float = 0.0
    """Memory of each; 0 is unknown."""


@dataclass(frozen=True)
class MemoryGrant:
    """Describe the memory that an executor gives a job of a role on each of its nodes."""

    gib: float
    nodes: int
    key: str
    """Key of [executor] that gives it, and its value."""


class Executor(ABC):
    """Run the jobs of a run on one machine or on a cluster."""

    is_here: ClassVar[bool]
    """Jobs run on the machine that submits them."""
    pause_s: ClassVar[float]
    """Longest time between two checks of a command that waits for the run."""
    array_size: ClassVar[int]
    """Largest number of jobs in one submission."""

    def pause(self, waited_s: float) -> float:
        """Return the seconds until the next check of a command that has waited so long."""
        return min(self.pause_s, 0.5 + waited_s / 10)

    @abstractmethod
    def check(self, submission: Submission) -> None:
        """Raise ConfigError with the key of a resource that does not fit the submission."""

    @abstractmethod
    def script(self, run: RunDir, submission: Submission) -> str:
        """Return the script that `submit` would submit, for people to read."""

    @abstractmethod
    def submit(self, run: RunDir, submission: Submission) -> str:
        """Start the jobs and return their id.

        Raise ConfigError, with the scheduler's own words, when it refuses; SchedulerError without an answer.
        """

    @abstractmethod
    def queue(self, run: RunDir) -> list[Job]:
        """List all waiting and running jobs of this run; raise SchedulerError when there is no answer."""

    @abstractmethod
    def endings(self, jobs: Sequence[str]) -> Mapping[str, str] | None:
        """Return how jobs ended, by id, with one request to the scheduler's accounting.

        Jobs whose end is not recorded yet are left out. The result is None where there is no accounting, or
        it cannot be read.
        """

    @abstractmethod
    def cancel(self, jobs: Sequence[str]) -> None:
        """End jobs at once, with all their processes; raise SchedulerError when there is no answer."""

    @abstractmethod
    def requeue(self) -> None:
        """Ask the scheduler to run this job again; called inside a job that was warned of its end."""

    def check_machine(self, jobs: Mapping[Role, int], environment: Mapping[str, str]) -> None:  # noqa: B027
        """Raise ConfigError with the key unless this machine can run the jobs of all roles at once."""

    def gpu_grant(self, role: Role) -> GpuGrant | None:
        """Return the GPUs that one job gets; None where that is unknown."""
        return None

    def memory_grant(self, role: Role) -> MemoryGrant | None:
        """Return the memory that one job gets; None where that is unknown."""
        return None

    def request(self, role: Role, jobs: int, processes: int) -> ResourceRequest | None:
        """Return what jobs of a role, each of so many processes, ask of a scheduler; None without one."""
        return None


def own_job_id() -> str:
    """Return the name of the job that this process belongs to.

    It is Slurm's id, or the submission's number of a job of this machine, or else the process id. Slurm's
    bare id of an array's last element means the whole array.
    """
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array:
        return f"{array}_{index}"
    if "SLURM_JOB_ID" in os.environ:
        return os.environ["SLURM_JOB_ID"]
    if MARK in os.environ:
        return log_name(os.environ[MARK])
    return f"local-{os.getpid()}"


def own_address() -> str:
    """Return the address at which a job's other nodes reach this one; outside Slurm it is the loopback."""
    return socket.gethostname() if "SLURM_JOB_ID" in os.environ else "127.0.0.1"


def log_name(mark: str) -> str:
    """Return the name of the log of a job of this machine, without its suffix."""
    return f"{int(mark.split(':', 2)[1]):06d}"


def job_script(
    submission: Submission,
    setup: Sequence[str],
    environ: Mapping[str, str],
    more: Sequence[str] = (),
    runtime: str = "",
) -> list[str]:
    """Return the lines of bash that run a job.

    They export the variables of the start and those of [executor] environ, define `module` where there are
    modules, run the lines of setup, then the command with the arguments `more`. A line of setup that fails
    ends the job with exit code 2. A TMPDIR that the node's scheduler has set is kept. With a `runtime` file
    the job runs the Python that it holds.
    """
    given = submission.environment.items()
    known = {name: text for name, text in given if not name.startswith(JOB_VARIABLES)}
    lines = [f"export {name}={shlex.quote(text)}" for name, text in (known | dict(environ)).items()]
    if "TMPDIR" in known and "TMPDIR" not in environ:
        lines[list(known).index("TMPDIR")] = f"export TMPDIR=${{TMPDIR:-{shlex.quote(known['TMPDIR'])}}}"
    if setup:  # `module` is a function of a login shell, which neither cron nor a batch script has
        lines.append(
            'type module >/dev/null 2>&1 || [ ! -r "$MODULESHOME/init/bash" ] || . "$MODULESHOME/init/bash"'
        )
    for line in setup:
        message = shlex.quote(f"error: [executor] setup: {line!r} fails with exit code")
        lines += ["{", line, f"}} || {{ echo {message} $? >&2; exit 2; }}"]
    if submission.code:
        lines.append(f"export PYTHONPATH={shlex.quote(submission.code)}${{PYTHONPATH:+:$PYTHONPATH}}")
    command = shlex.join([*submission.command, *more])
    if runtime and submission.code:
        python, *arguments = submission.command
        words = [f"{submission.code}/{RUNTIME}", runtime, submission.code]
        lines += [f"python={shlex.quote(python)}", f". {shlex.join(words)}"]
        command = f'"$python" {shlex.join([*arguments, *more])}'
    return [*lines, f"exec {command}"]


def check_runtime(file: str) -> None:
    """Raise ConfigError if the runtime file of jobs is not there."""
    if file and not Path(file).is_file():
        raise ConfigError(
            f"[executor] runtime = '{file}': no such file; containers/build_runtime.sh makes it, from the "
            "environment of jobs"
        )


def check_environ(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable of [executor] environ that each job gets its own of, or a secret."""
    for name, text in environ.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or "\n" in text:
            raise ConfigError(
                f"environ.{name}: an environment variable has a plain name and one line of text"
            )
        if name.startswith(JOB_VARIABLES) or name == "PYTHONPATH":
            raise ConfigError(f"environ.{name}: each job gets its own value; ask for GPUs by their number")
        if is_secret(name, text):
            raise ConfigError(
                f"environ.{name}: this looks like a secret, and the run folder and batch scripts store it; "
                "have a line of setup read it from a file that only you can read"
            )


def own_environment() -> dict[str, str]:
    """Return the variables of this process that say where programs are and how they are set up; no secret."""
    kept = {name: text for name, text in os.environ.items() if name.startswith(KEPT) and "\n" not in text}
    return {name: text for name, text in kept.items() if not is_secret(name, text)}


def is_secret(name: str, text: str) -> bool:
    """Return whether a variable looks like a password or a key, which no file of a run may hold."""
    return bool(SECRET.search(name.upper()) or re.search(r"://[^/\s]*@|-----BEGIN", text))
