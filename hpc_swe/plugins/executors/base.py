"""The seam: who runs jobs. It submits, lists and cancels; what a job achieves is read in the run folder."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

from hpc_swe.errors import ConfigError
from hpc_swe.records import Role
from hpc_swe.rundir import RunDir

SINGLE: tuple[Role, ...] = ("coordinator", "learner")
"""Roles of which a run has one job at most."""
OF_A_JOB = (
    *("SLURM_", "SLURMD_", "SRUN_", "SBATCH_CPU_BIND", "SBATCH_MEM_BIND"),
    *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)
"""Variables, or how their names begin, by which a scheduler tells one job its place."""
SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|USERNAME|(^|_)(API)?KEYS?(_|$)|(^|_)AUTH(_|$)"
)


@dataclass(frozen=True)
class Submission:
    """Some jobs of one role, submitted at once."""

    run_id: str
    role: Role
    number: int
    """The how-many-th of its role in the run, from 1."""
    count: int
    """Jobs, one array."""
    processes: int
    """Processes of each job, over all its nodes."""
    command: Sequence[str]
    """What each job runs: `python -m jobs.run ...`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the command that started the run, which a tick of cron does not have."""
    code: str = ""
    """Folder of the packages that jobs import."""


@dataclass(frozen=True)
class Job:
    """One job that the scheduler knows and that has not ended."""

    role: Role
    job: str
    submission: int
    state: Literal["running", "waiting", "held", "broken"]
    """Held jobs wait for a person; broken ones will never start."""
    reason: str = ""
    """Why it waits, in the scheduler's words."""


@runtime_checkable
class Executor(Protocol):
    """The plugin."""

    is_here: ClassVar[bool]
    """Jobs run on the machine that submits them."""
    pause_s: float
    """Seconds between two looks of `launch start --wait`."""
    array_size: int
    """Most jobs of one submission."""

    def check(self, submission: Submission) -> None:
        """Refuse what cannot run.

        Raises:
            ConfigError: A resource does not fit the submission; the message names the key.
        """

    def script(self, run: RunDir, submission: Submission) -> str:
        """What `submit` would hand over, for people."""

    def submit(self, run: RunDir, submission: Submission) -> str:
        """Start the jobs; returns their id.

        Raises:
            ConfigError: The scheduler refuses; the message is its own.
            SchedulerError: It does not answer.
        """

    def queue(self, run: RunDir) -> list[Job]:
        """All jobs of this run that wait or run, by one question.

        Raises:
            SchedulerError: The scheduler does not answer.
        """

    def endings(self, jobs: Sequence[str]) -> Mapping[str, str] | None:
        """Id -> how a job ended, by one question to the scheduler's book, without what it does not tell yet.

        None where there is no book, or it cannot be read.
        """

    def cancel(self, jobs: Sequence[str]) -> None:
        """End jobs at once, with all their processes.

        Raises:
            SchedulerError: The scheduler does not answer.
        """

    def requeue(self) -> None:
        """Inside a job that was warned of its end: ask that it be run again."""


def shell(
    submission: Submission, setup: Sequence[str], environ: Mapping[str, str], more: Sequence[str] = ()
) -> list[str]:
    """Lines of bash that run a job: the start's variables, those of [executor] environ, the lines of setup.

    A line of setup that fails ends the job. TMPDIR stays as the node's scheduler has set it, if it has.
    """
    known = {name: text for name, text in submission.environment.items() if not name.startswith(OF_A_JOB)}
    lines = [f"export {name}={shlex.quote(text)}" for name, text in (known | dict(environ)).items()]
    if "TMPDIR" in known and "TMPDIR" not in environ:
        lines[list(known).index("TMPDIR")] = f"export TMPDIR=${{TMPDIR:-{shlex.quote(known['TMPDIR'])}}}"
    for line in setup:
        said = shlex.quote(f"error: [executor] setup: {line!r} fails with exit code")
        lines += ["{", line, f"}} || {{ echo {said} $? >&2; exit 2; }}"]
    if submission.code:
        lines.append(f"export PYTHONPATH={shlex.quote(submission.code)}${{PYTHONPATH:+:$PYTHONPATH}}")
    return [*lines, f"exec {shlex.join([*submission.command, *more])}"]


def require_environ(environ: Mapping[str, str]) -> None:
    """Refuse what is no variable, what the executor itself sets, and what looks like a secret.

    Raises:
        ConfigError: It names the variable.
    """
    for name, text in environ.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or "\n" in text:
            raise ConfigError(f"environ.{name}: no name and line of an environment variable")
        if name.startswith(OF_A_JOB) or name == "PYTHONPATH":
            raise ConfigError(f"environ.{name}: each job is given its own; ask for GPUs by their number")
        if is_secret(name, text):
            raise ConfigError(
                f"environ.{name}: this looks like a secret, and the run folder and batch scripts keep it; "
                "have a line of setup read it from a file that only you can read"
            )


def is_secret(name: str, text: str) -> bool:
    """Whether a variable looks like a password or a key, which no file of a run may hold."""
    return bool(SECRET.search(name.upper()) or re.search(r"://[^/\s]*@|-----BEGIN", text))
