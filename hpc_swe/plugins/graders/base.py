"""The seam: who judges a submission."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec

from hpc_swe.plugins.sandboxes.base import Sandboxes
from hpc_swe.records import Score, Task

GRADER_BROKE: Final = "the grader broke"
"""How the detail of a score begins that stands for an exception of the grader."""
DISAGREES: Final = "its sittings disagree"
"""The same, of a submission that passed a test in one sitting and failed the same test in another."""
SILENT: Final = "its later sittings told nothing"
"""The same, of a submission that resolved at first, and whose tests did not come to an end later."""


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


CHANGED_TESTS = "changed_tests"
"""Of `TestPlan.extra`: versions of the hidden tests, in JSON. Only reward workers' tasks have it."""


class HiddenEdit(msgspec.Struct, frozen=True):
    """A piece of a task's hidden tests, and what stands there instead."""

    start: int
    """Characters from the beginning."""
    old: str
    new: str


class Version(msgspec.Struct, frozen=True):
    """Hidden tests that expect something else."""

    edits: list[HiddenEdit]
    tests: list[str]
    """Names of wanted tests that were changed and that the reference now fails."""
    unsure: list[str]
    """Other names of which nothing can be asked, since the reference fails them too or passes the change."""


def carrying(task: Task, versions: str) -> Task:
    """The task with versions of its hidden tests, if it has some."""
    if not versions:
        return task
    extra = task.tests.extra | {CHANGED_TESTS: versions}
    return msgspec.structs.replace(task, tests=msgspec.structs.replace(task.tests, extra=extra))


@runtime_checkable
class Resitting(Protocol):
    """A grader that grades what resolved once more, by changed tests."""

    def changed_tests(self, task: Task, reference: str, sandboxes: Sandboxes) -> tuple[list[Version], str]:
        """Versions that the reference, which resolves the task, was seen to fail; and why there are none."""


@dataclass(frozen=True)
class GradedPatch:
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

    def report(self, folder: Path, label: str, model: str, verdicts: Sequence[GradedPatch]) -> None:
        """Write it below a folder, of one attempt at every task."""
