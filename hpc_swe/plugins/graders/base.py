"""The seam: who judges a submission."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from hpc_swe.plugins.sandboxes.base import Sandboxes
from hpc_swe.records import Score, Task

GRADER_BROKE: Final = "the grader broke"
"""How the detail of a score begins that stands for an exception of the grader."""


@runtime_checkable
class Grader(Protocol):
    """The plugin."""

    @property
    def unresolved_reward(self) -> float:
        """What a submission gets that the grader cannot judge, since its own code fails on it."""

    def grade(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        """Judge a submission in fresh sandboxes that no agent has touched.

        Raises:
            SandboxError: The host failed; the score is then `infra_error`, made by the worker.
        """


@runtime_checkable
class Examiner(Grader, Protocol):
    """A grader that can itself be tried: by nothing, which must not resolve a task."""

    def examine(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        """As `grade`, but the tests run even when nothing is handed in."""


@dataclass(frozen=True)
class Verdict:
    """What was handed in for a task, and what a grader said of it."""

    task: Task
    submission: str
    score: Score

    @property
    def is_prediction(self) -> bool:
        """Not what infrastructure failed before anything was handed in: swebench calls that incomplete."""
        return bool(self.submission) or self.score.outcome != "infra_error"


@runtime_checkable
class Official(Protocol):
    """A grader of a benchmark that has a report of its own, which others can read."""

    def report(self, folder: Path, label: str, model: str, verdicts: Sequence[Verdict]) -> None:
        """Write it below a folder, of one attempt at every task."""
