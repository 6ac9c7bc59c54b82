"""The interface that every grader implements."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from hpc_swe.agents.sandboxes.base import CommandResult, Sandboxes
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Outcome, Score, Task
from hpc_swe.tasks.hidden_tests import Version

GRADER_BROKE: Final = "the grader broke"
"""Begins the detail of a score that stands for an exception of the grader."""
Findings = Mapping[str, Collection[str]]
"""What the guard found -> the files that it comes from; an empty name is code of no file."""
DISAGREES: Final = "its test runs disagree"
"""Begins the detail when a patch passed a test in one retest and failed the same test in another."""
SILENT: Final = "its later test runs gave no result"
"""Begins the detail when a patch resolved the task at first, and its tests did not come to an end later."""


@dataclass(frozen=True)
class Inspection:
    """An inspection says what a grader can prove with a task's tests."""

    assertions: int
    """Assertions of the tests that judge the task."""
    sealed: int
    """How many of these have their expected values outside the sandbox."""
    unsealed: dict[str, list[str]]
    """Test file -> places of assertions that must compare in the sandbox, as values of the reference show."""
    remark: str = ""
    """What a person should know about the names of the tests."""


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


class Grader(ABC):
    """A grader runs hidden tests on a patch and gives it a score."""

    unresolved_reward: float
    """Reward of a patch that cannot be judged because its own code makes the grader fail."""
    reports_outcomes: ClassVar[bool] = False
    """Whether `outcomes` reports every test of a run."""
    is_repeatable: ClassVar[bool] = False
    """Whether scores can be final; only then does an equal patch wait for a sibling's grading."""

    def longest_s(self, task: Task) -> float:
        """Return the most seconds that a grading is in one sandbox: for tests, and for steps around them."""
        return 2 * task.tests.timeout_s

    @abstractmethod
    def grade(self, task: Task, patch: str, sandboxes: Sandboxes) -> Score:
        """Judge a patch in fresh sandboxes that no agent has touched.

        Raise SandboxError if the host failed; the worker then makes the score `infra_error`.
        """

    def examine(self, task: Task, patch: str, sandboxes: Sandboxes) -> Score:
        """Grade a patch as `grade` does, but run the tests even when the patch is empty.

        The empty patch must not resolve a task: this tests the grader itself.
        """
        return self.grade(task, patch, sandboxes)

    def complete(self, task: Task, sandboxes: Sandboxes) -> Task:
        """Return the task with all that its tests need; raise SandboxError if its image lacks it."""
        return task

    def reference(self, task: Task, sandboxes: Sandboxes) -> str | None:
        """Return a right patch that a solution of the task makes in a sandbox; None if it has none."""
        return None

    def changed_tests(self, task: Task, reference: str, sandboxes: Sandboxes) -> tuple[list[Version], str]:
        """Return versions of the tests that the reference fails; or none, and the reason.

        The reference resolves the task. A patch that resolves it is tested again with such a version.
        """
        return [], "this grader has no retest"

    def inspect(self, task: Task, reference: str | None, sandboxes: Sandboxes) -> Inspection | None:
        """Collect a task's tests without a patch and with its reference, if any, and look at its assertions.

        None if the grader keeps no expected values outside the sandbox. Raise SandboxError if the host
        failed.
        """
        return None

    def proves(self, inspection: Inspection) -> bool:
        """Return whether so many sealed assertions are enough for a usable task."""
        return True

    def outcomes(self, task: Task, patch: str, sandboxes: Sandboxes) -> tuple[dict[str, str], str]:
        """Return test -> outcome of all tests, named as in the task's lists; or nothing and the reason.

        Raise SandboxError if the host failed.
        """
        raise NotImplementedError

    def report(  # noqa: B027
        self, folder: Path, label: str, model: str, verdicts: Sequence[GradedPatch]
    ) -> None:
        """Write the benchmark's own report of one attempt at every task below a folder, if there is one."""


RESOLVED = 1.0  # reward of an episode that passes all tests: the unit of the other rewards


class HiddenTestGrader(Plugin, Grader, frozen=True, kw_only=True):
    """A patch resolves a task when all fail-to-pass and pass-to-pass tests pass."""

    unresolved_reward: float = -1.0
    """Reward of one that does not."""
    cheated_reward: float = -2.0
    """Reward of one that cheated. It should be below `unresolved_reward`: a lie that is paid once in 31 times
    would otherwise be worth more than an honest failure."""

    def score(
        self, task: Task, outcome: Outcome, passed: Collection[str], detail: str, seconds: float
    ) -> Score:
        """Make the score of a patch that passed these tests; all other wanted tests failed."""
        rewards = {"resolved": RESOLVED, "cheated": self.cheated_reward}
        return Score(
            outcome=outcome,
            reward=rewards.get(outcome, self.unresolved_reward),
            passed=sorted(passed),
            failed=sorted({*task.tests.fail_to_pass, *task.tests.pass_to_pass}.difference(passed)),
            detail="" if outcome == "resolved" else detail,
            seconds=seconds,
        )


def charges(found: Findings, base: Findings, touched: Collection[str]) -> list[str]:
    """Return what was found in files that a patch changes, or in no file, and not in the run of the base."""
    new = {what: {*places}.difference(base.get(what, ())) for what, places in found.items()}
    return sorted(what for what, places in new.items() if not places.isdisjoint({*touched, ""}))


def ending(result: CommandResult) -> str:
    """Describe how a command ended, in one line with the last 500 characters of its output."""
    state = "timed out; " if result.timed_out else "broke its sandbox; " if result.broke_sandbox else ""
    return f"{state}exit code {result.exit_code}: {result.output.strip()[-500:]}"
