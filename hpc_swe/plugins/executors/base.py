"""The seam: who starts jobs and knows which of them live."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hpc_swe.records import Role
from hpc_swe.rundir import RunDir


@runtime_checkable
class Executor(Protocol):
    """The plugin. A job is one process tree that runs `python -m jobs.run ROLE RUN`."""

    def submit(self, run: RunDir, role: Role, command: Sequence[str]) -> str:
        """Start one job; returns its id.

        Raises:
            ConfigError: The scheduler refuses; the message is its own.
        """
        ...

    def alive(self, run: RunDir) -> dict[Role, list[str]]:
        """Ids of this run's jobs that run or wait, by role."""
        ...

    def cancel(self, run: RunDir, job: str) -> None:
        """End one job at once, with all its processes."""
        ...
