"""The seam: who judges a submission."""

from typing import Protocol, runtime_checkable

from hpc_swe.plugins.sandboxes.base import Sandboxes
from hpc_swe.records import Score, Task


@runtime_checkable
class Grader(Protocol):
    """The plugin."""

    def grade(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        """Judge a submission in fresh sandboxes that no agent has touched.

        Raises:
            SandboxError: The host failed; the score is then `infra_error`, made by the worker.
        """
