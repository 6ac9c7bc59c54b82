"""Grade a patch of plain files with pytest, in a fresh sandbox that no agent has touched.

The host applies the patch to the task's files, restores the files that set up pytest, and writes the task's
tests last, without their expected values (`sealed`). For an assertion that cannot be sealed the grader
trusts the process in the sandbox, guarded by two canary tests. So weak tests prove little.

Where a task names no tests, every test counts that pytest collects in the task's own files (`_base`). A test
that is skipped, or fails as expected, does not count if it ends so without any patch.
"""

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import replace

from hpc_swe.agents.sandboxes.base import CommandResult, Sandboxes
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Score, Task
from hpc_swe.tasks.graders._base import Base, base_of
from hpc_swe.tasks.graders._exam import Exam, Places, TestReport, longest_s, processor_s, sealed_modules
from hpc_swe.tasks.graders._images import require_pytest
from hpc_swe.tasks.graders._sealing.sealed import Sealed
from hpc_swe.tasks.graders.base import HiddenTestGrader, Inspection, charges, ending
from hpc_swe.tasks.hidden_tests import unsealed_of
from hpc_swe.tasks.patch import BadPatch, apply
from hpc_swe.tasks.second_run import oom_kills
from hpc_swe.tasks.visible_tests import SOLUTION, holds_only_tests, holds_tests

_SEALED = "\n(pytest saw no expected values, which stay outside the sandbox; test_bad fails on purpose)"


@dataclass(frozen=True)
class _TestRun:
    """A ran is one run of the tests on a patched program."""

    task: Task
    exam: Exam
    kept: set[str]
    """Files of tests that the patch changes, and that were put back."""
    base: Base
    result: CommandResult
    report: TestReport

    @property
    def is_final(self) -> bool:
        """Return whether this run and those without the patch came to their end, or never will."""
        return not self.result.exit_code and self.report.has_end and not self.base.unfinished


class Pytest(HiddenTestGrader, frozen=True, kw_only=True):
    """A patch resolves a task when all tests pass that count."""

    unresolved_reward: float = 0.0
    cheated_reward: float = -1.0
    is_repeatable: ClassVar[bool] = True
    sealed: ClassVar[bool] = True  # expected values stay outside the sandbox
    accept_unsealed: bool = False
    """Whether runs take checked tasks of which no expected value can stay outside; else they are unsealed."""

    def longest_s(self, task: Task) -> float:
        return longest_s(task)

    def grade(self, task: Task, patch: str, sandboxes: Sandboxes) -> Score:
        """Grade a patch; an empty one starts no sandbox."""
        if task.base_commit:
            raise ConfigError(f"[grader] pytest judges plain files; {task.task_id} is a repository")
        if not patch.strip():
            return Score(outcome="no_submission", reward=self.unresolved_reward)
        return self.examine(task, patch, sandboxes)

    def examine(self, task: Task, patch: str, sandboxes: Sandboxes) -> Score:
        started, killed = time.monotonic(), oom_kills()
        try:
            patched = apply(task, patch)
        except BadPatch as error:
            return Score(outcome="unresolved", reward=self.unresolved_reward, detail=str(error))
        first = ran = self._run(task, patched, self._opened(task), sandboxes)
        doubtful = ran.exam.opaque(ran.report)
        # Only what the task's own program computes opens an assertion, and nothing that the patch does.
        if doubtful and (known := doubtful & ran.base.exam.opaque(ran.base.report(sandboxes))):
            ran = self._run(task, patched, self._opened(task) | known, sandboxes)
        score = self._score(ran, sandboxes, time.monotonic() - started)
        return replace(score, is_final=first.is_final and ran.is_final and oom_kills() == killed)

    def inspect(self, task: Task, reference: str | None, sandboxes: Sandboxes) -> Inspection:
        """Collect the tests, and find the assertions that can be sealed."""
        opened, remark = self._opened(task), ""
        base = base_of(task, self._modules(task, opened))
        found = base.collected(sandboxes)
        if reference is None:
            opened |= base.exam.opaque(base.report(sandboxes))
        else:
            ran = self._run(task, apply(task, reference), opened, sandboxes)
            opened |= ran.exam.opaque(ran.report)
            remark = _compared(task, {*found}, {*ran.report.collected})
        modules = self._modules(task, opened)
        unsealed: dict[str, list[str]] = {}
        for path, place in sorted(opened):
            unsealed.setdefault(path, []).append(place)
        return Inspection(
            assertions=sum(one.assertions for one in modules.values()),
            sealed=sum(one.sealed for one in modules.values()),
            unsealed=unsealed,
            remark=remark,
        )

    def proves(self, inspection: Inspection) -> bool:
        """Return whether some expected value stays outside the sandbox, or the configuration needs none."""
        return bool(inspection.sealed) or self.accept_unsealed or not self.sealed

    def _opened(self, task: Task) -> Places:
        places = unsealed_of(task)
        return frozenset((path, place) for path, here in places.items() for place in here)

    def _modules(self, task: Task, opened: Places) -> Mapping[str, Sealed]:
        return sealed_modules(task, opened, self.sealed)

    def _run(self, task: Task, patched: dict[str, str], opened: Places, sandboxes: Sandboxes) -> _TestRun:
        modules = self._modules(task, opened)
        base = base_of(task, modules)
        kept = _judges(base, patched, sandboxes)
        exam = Exam(task, patched, modules, kept)
        result, report = exam.run(sandboxes)
        if not report.outcomes:  # the patch, or the image
            require_pytest(task, sandboxes)
        return _TestRun(
            task=task,
            exam=exam,
            kept=kept,
            base=base,
            result=result,
            report=report,
        )

    def _score(self, ran: _TestRun, sandboxes: Sandboxes, seconds: float) -> Score:
        task, exam, report = ran.task, ran.exam, ran.report
        names = {*task.tests.fail_to_pass, *task.tests.pass_to_pass}
        wanted = names or exam.wanted(ran.base.collected(sandboxes), report)
        right = exam.passed(report)
        if skipped := {name for name in wanted if report.outcomes.get(name) == "skipped"}:
            before = ran.base.report(sandboxes).outcomes
            wanted -= {name for name in skipped if before.get(name) == "skipped"}
        if not names:  # also what the task's own files do not have: parameters that the patch adds
            ended = {name for name, outcome in report.outcomes.items() if outcome != "skipped"}
            wanted |= {name for name in ended - right if name.partition("::")[0] in task.tests.files}
        task = _naming(task, wanted)
        passed = wanted & right
        good, bad = (report.outcomes.get(f"{exam.canaries}::{name}") for name in ("test_good", "test_bad"))
        found = ["a canary test ended wrongly"] if good == "failed" or bad == "passed" else []
        if not found and charges(report.odd, {}, exam.touched):  # the task's own files may do the same
            found = charges(report.odd, ran.base.report(sandboxes).odd, exam.touched)[:3]
        if found:
            detail = f"the patch changes how tests end: {'; '.join(found)}"
            return self.score(task, "cheated", (), detail, seconds)
        is_resolved = bool(passed) and passed == wanted and good == "passed"
        if is_resolved and (values := _always_equal(ran, sandboxes)):
            detail = f"values of {', '.join(values)} equal everything"
            return self.score(task, "cheated", (), detail, seconds)
        is_long = ran.result.exit_code == 128 + signal.SIGXCPU
        detail = f"the tests used more than {processor_s(task)} s of processor time; " * is_long
        detail += ending(ran.result) + _SEALED * bool(exam.answers.checks)
        if ran.kept:
            detail += f"\n(put back, since tests are from them: {', '.join(sorted(ran.kept))})"
        return self.score(task, "resolved" if is_resolved else "unresolved", passed, detail, seconds)


def _judges(base: Base, patched: Mapping[str, str], sandboxes: Sandboxes) -> set[str]:
    """Return the files that a patch changes and that tests are from: they inherit or import them.

    Where a file's tests cannot be collected without the patch, also files count that define tests and nothing
    else. Never is the file that holds the program of published sets among them.
    """
    texts = {path: text for path, text in base.task.files.items() if patched.get(path) != text}
    doubtful = {path for path, text in texts.items() if path != SOLUTION and holds_tests(text)}
    doubtful -= base.task.tests.files.keys()
    doubtful = {path for path in doubtful if base.may_hold(texts[path]) or holds_only_tests(texts[path])}
    if not doubtful:  # then nothing needs to be run
        return set()
    found = doubtful & base.homes(sandboxes)
    collected = {name.partition("::")[0] for name in base.collected(sandboxes)}
    if base.modules.keys() - collected:
        found |= {path for path in doubtful if holds_only_tests(texts[path])}
    return found


def _naming(task: Task, wanted: set[str]) -> Task:
    named = [name for name in task.tests.fail_to_pass if name in wanted]
    kept = [name for name in task.tests.pass_to_pass if name in wanted]
    more = sorted(wanted.difference(named, kept))
    return replace(task, tests=replace(task.tests, fail_to_pass=[*named, *more], pass_to_pass=kept))


def _always_equal(ran: _TestRun, sandboxes: Sandboxes) -> list[str]:
    """Return classes of the patch whose values equal everything, where that could have passed a test."""
    found, touched = ran.report.always_equal, ran.exam.touched
    if not charges(found, {}, touched):
        return []
    return charges(found, ran.base.report(sandboxes).always_equal, touched)[:3]


def _compared(task: Task, found: set[str], repaired: set[str]) -> str:
    """Say how the tests that pytest collects differ from those that count."""
    names = {*task.tests.fail_to_pass, *task.tests.pass_to_pass}
    files = {name.partition("::")[0] for name in names} or task.tests.files.keys()
    if unnamed := sorted(name for name in repaired - names if names and name.partition("::")[0] in files):
        return (
            f"{len(unnamed)} collected tests count for nothing, as the row does not name them: {unnamed[0]}"
        )
    if not names and found and found != repaired:
        one = min(found ^ repaired)
        return f"with the reference pytest collects {len(repaired)} tests, without it {len(found)}: {one}"
    return ""
