"""The seam: who starts jobs and knows which of them live."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hpc_swe.records import Role
from hpc_swe.rundir import RunDir


@dataclass(frozen=True)
class Job:
    """One submission."""

    role: Role
    job: str
    submitted: float
    """Seconds since the epoch on the clock of the submitting host."""
    is_alive: bool
    """It runs or waits to run."""


@runtime_checkable
class Executor(Protocol):
    """The plugin. A job is one process tree that runs `python -m jobs.run ROLE RUN`."""

    def submit(self, run: RunDir, role: Role, command: Sequence[str]) -> str:
        """Start one job; returns its id.

        Raises:
            ConfigError: The scheduler refuses; the message is its own.
        """

    def jobs(self, run: RunDir) -> list[Job]:
        """All submissions of this run."""

    def cancel(self, run: RunDir, job: str) -> None:
        """End one job at once, with all its processes."""
