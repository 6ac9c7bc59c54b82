"""The interface that every grader implements."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec

from hpc_swe.plugins.sandboxes.base import CommandResult, Sandboxes
from hpc_swe.records import Score, Task

GRADER_BROKE: Final = "the grader broke"
"""Begins the detail of a score that stands for an exception of the grader."""
DISAGREES: Final = "its sittings disagree"
"""Begins the detail when a patch passed a test in one sitting and failed the same test in another."""
SILENT: Final = "its later sittings gave no result"
"""Begins the detail when a patch resolved the task at first, and its tests did not come to an end later."""


@runtime_checkable
class Grader(Protocol):
    """A grader runs hidden tests on a patch and gives it a score."""

    @property
    def unresolved_reward(self) -> float:
        """Reward of a patch that cannot be judged because its own code makes the grader fail."""

    def grade(self, task: Task, patch: str, sandboxes: Sandboxes) -> Score:
        """Judge a patch in fresh sandboxes that no agent has touched.

        Raises:
            SandboxError: The host failed; the worker then makes the score `infra_error`.
        """


@runtime_checkable
class Examiner(Grader, Protocol):
    """A grader that can itself be tested: the empty patch must not resolve a task."""

    def examine(self, task: Task, patch: str, sandboxes: Sandboxes) -> Score:
        """Grade a patch like `grade`, but run the tests even when the patch is empty."""


CHANGED_TESTS = "changed_tests"
"""Key of `TestPlan.extra` with versions of the hidden tests, in JSON. Only reward workers' tasks have it."""


class HiddenEdit(msgspec.Struct, frozen=True):
    """An edit replaces one piece of a task's test patch."""

    start: int
    """Offset in characters from the beginning of the test patch."""
    old: str
    new: str


class Version(msgspec.Struct, frozen=True):
    """A version of the hidden tests expects other values than the original."""

    edits: list[HiddenEdit]
    tests: list[str]
    """Names of wanted tests that were changed and that the reference now fails."""
    unsure: list[str]
    """Other names that say nothing about a patch: the reference fails them too, or passes the change."""


def with_versions(task: Task, versions: str) -> Task:
    """Add encoded versions of the hidden tests to a task; an empty text leaves the task as it is."""
    if not versions:
        return task
    extra = task.tests.extra | {CHANGED_TESTS: versions}
    return msgspec.structs.replace(task, tests=msgspec.structs.replace(task.tests, extra=extra))


@runtime_checkable
class Regrader(Protocol):
    """A grader that grades a resolving patch again with changed tests: it gets a second sitting."""

    def changed_tests(self, task: Task, reference: str, sandboxes: Sandboxes) -> tuple[list[Version], str]:
        """Return versions that the reference, which resolves the task, fails; or none and the reason."""


@dataclass(frozen=True)
class GradedPatch:
    """A patch of an attempt at a task, together with the score that a grader gave it."""

    task: Task
    patch: str
    score: Score

    @property
    def is_prediction(self) -> bool:
        """False if infrastructure failed before anything was handed in: swebench calls that incomplete."""
        return bool(self.patch) or self.score.outcome != "infra_error"


@runtime_checkable
class Official(Protocol):
    """A grader of a benchmark that has a report format of its own, which other tools can read."""

    def report(self, folder: Path, label: str, model: str, verdicts: Sequence[GradedPatch]) -> None:
        """Write the report of one attempt at every task below a folder."""


def ending(result: CommandResult) -> str:
    """Describe how a command ended, in one line with the last 500 characters of its output."""
    state = "timed out; " if result.timed_out else "broke its sandbox; " if result.broke_sandbox else ""
    return f"{state}exit code {result.exit_code}: {result.output.strip()[-500:]}"
