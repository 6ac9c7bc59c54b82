"""The seam: who starts processes and knows which live."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from hpc_swe.records import Role


@dataclass(frozen=True)
class Submission:
    """So many more processes of a role."""

    role: Role
    count: int


@runtime_checkable
class Executor(Protocol):
    """The plugin."""

    def submit(self, run: Path, submission: Submission, tasks: int) -> None:
        """Start jobs of a role, each of `tasks` processes."""
        ...

    def alive(self, run: Path) -> dict[Role, int]:
        """Jobs of this run that run or wait, by role."""
        ...

    def cancel(self, run: Path) -> None:
        """End all jobs of this run."""
        ...
