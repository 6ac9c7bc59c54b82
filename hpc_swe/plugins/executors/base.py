"""The seam: who runs jobs. It submits, lists and cancels; what a job achieves is read in the run folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

from hpc_swe.records import Role
from hpc_swe.rundir import RunDir

SINGLE: tuple[Role, ...] = ("coordinator", "learner")
"""Roles of which a run has one job at most."""


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
