"""Try one mutant: its tests must fail, those of the original must pass, and the grader must see both."""

import json
from dataclasses import dataclass
from typing import Any

from hpc_swe.base.records import Task, TestPlan
from hpc_swe.makers.bugs import statements
from hpc_swe.makers.bugs.mutations import Mutant
from hpc_swe.makers.bugs.sources import CodeSource
from hpc_swe.makers.bugs.surveys import Survey
from hpc_swe.makers.bugs.trials import TrialPlace
from hpc_swe.tasks.graders.base import Grader
from hpc_swe.tasks.patch import difference
from hpc_swe.tasks.visible_tests import cut, half, names_of_tests

MOST_TRIED = 40
"""Tests that are tried on a mutant, the quickest ones that run its line."""
MOST_OF_KIND = 8
"""Failing tests of a task, and passing ones."""
SLOWER, LEAST_S = 20, 5.0
"""Time of a mutant's tests: so many times that of the original's, and so many seconds more."""
VALID = "valid"


@dataclass(frozen=True)
class Trier:
    """Try mutants in one place."""

    place: TrialPlace
    grader: Grader
    hidden: float
    """Share of a task's tests that the agent does not see."""
    timeout_s: float
    statement: statements.Kind = "program"
    """What a task's problem statement says: that there is a fault, or also in which function."""

    def attempt(
        self, source: CodeSource, survey: Survey, mutant: Mutant, task_id: str
    ) -> tuple[str, dict[str, Any]]:
        """Return ``valid`` and the row of the task, or the reason of a rejection and an empty row.

        Raise SandboxError if the host failed.
        """
        covering = [id_ for id_, test in survey.tests.items() if test.ran(*mutant.lines)]
        if len({survey.tests[id_].name for id_ in covering}) < 2:
            return "fewer than two tests run the changed lines", {}
        tried = sorted(covering, key=lambda id_: survey.tests[id_].seconds)[:MOST_TRIED]
        files = {path: source.files[path] for path in survey.files} | {source.target: mutant.text}
        paths = sorted({id_.partition("::")[0] for id_ in tried})
        timeout_s = min(self.timeout_s, LEAST_S + SLOWER * sum(survey.tests[id_].seconds for id_ in tried))
        trial = self.place.run(self.place.task(files, source.absent), paths, tried, timeout_s)
        if trial is None:
            return "its tests do not end in time, or end the process", {}
        if not any(test.outcome for test in trial.tests.values()):
            return "its tests do not load", {}
        passed = [id_ for id_ in tried if id_ in trial.tests and trial.tests[id_].has_passed]
        failed = [id_ for id_ in tried if id_ not in passed]
        if not failed:
            return "all tests that run the changed lines pass", {}
        row = self._row(source, survey, mutant, task_id, failed[:MOST_OF_KIND], passed[:MOST_OF_KIND])
        return self._complaint(source.target, row, survey) or VALID, row

    def _row(
        self,
        source: CodeSource,
        survey: Survey,
        mutant: Mutant,
        task_id: str,
        failed: list[str],
        passed: list[str],
    ) -> dict[str, Any]:
        """Make the row; half of the failing tests and half of all are hidden, so one that fails is seen."""
        functions = {id_: _function(id_, survey) for id_ in (*failed, *passed)}
        broken = {functions[id_] for id_ in failed}
        whole = {*functions.values()} - broken
        hidden = half(broken, task_id, self.hidden)
        rest = int(self.hidden * (len(broken) + len(whole))) - len(hidden)
        hidden |= half(whole, task_id, min(1.0, (rest + 0.5) / max(1, len(whole))))
        paths = sorted({id_.partition("::")[0] for id_ in functions})
        graded = {path: _only(source.files[path], path, {*functions.values()}) for path in paths}
        seen = {path: _only(text, path, {*functions.values()} - hidden) for path, text in graded.items()}
        programs = {path: source.files[path] for path in survey.files if path not in source.tests}
        programs |= {source.target: mutant.text}
        files = programs | seen
        statement = statements.GENERAL
        if self.statement == "function":
            statement = statements.with_function(source.target, mutant, broken - hidden, files)
        return {
            "task_id": task_id,
            "problem_statement": statement,
            "prompt": json.dumps([{"role": "user", "content": statement}]),
            "extra_info": {
                "entrypoint": f"python -m pytest {' '.join(paths)}",
                "files": _listed(files),
                "task_name": f"{source.name}: {mutant.function.name}: {mutant.kind}",
            },
            "tests": _listed(graded),
            "fixed": _listed({source.target: source.files[source.target]}),
            "fail_to_pass": failed,
            "pass_to_pass": passed,
            "absent": list(source.absent),
        }

    def _complaint(self, target: str, row: dict[str, Any], survey: Survey) -> str:
        """Let the grader judge the original and the mutant, and run what the agent sees."""
        task = self._task(row)
        reference = difference(target, task.files[target], row["fixed"][0]["content"])
        gold = self.grader.examine(task, reference, self.place.sandboxes)
        if gold.outcome != "resolved":
            return f"the grader calls the original {gold.outcome}"
        empty = self.grader.examine(task, "", self.place.sandboxes)
        if empty.outcome != "unresolved" or {*empty.failed} != {*task.tests.fail_to_pass}:
            return "its tests do not fail the same way twice"
        seen = self.place.run(task, [*task.tests.files], [], self.timeout_s)
        if seen is None or all(test.has_passed for test in seen.tests.values()):
            return "the tests that the agent sees do not show the fault"
        failed = {id_ for id_, test in seen.tests.items() if test.outcome == "failed"}
        if failed - survey.tests.keys():  # such as those of a mixin that pytest takes for a class of tests
            return "the agent sees tests fail that may fail for the original, too"
        return ""

    def _task(self, row: dict[str, Any]) -> Task:
        tests = {one["path"]: one["content"] for one in row["tests"]}
        plan = TestPlan(
            command=row["extra_info"]["entrypoint"],
            files=tests,
            fail_to_pass=row["fail_to_pass"],
            pass_to_pass=row["pass_to_pass"],
            timeout_s=self.timeout_s,
        )
        files = {one["path"]: one["content"] for one in row["extra_info"]["files"]}
        return self.place.task(files, row["absent"], plan, row["task_id"])


def _function(test_id: str, survey: Survey) -> str:
    return f"{test_id.partition('::')[0]}::{survey.tests[test_id].name}"


def _only(text: str, path: str, functions: set[str]) -> str:
    return cut(text, {name for name in names_of_tests(text) if f"{path}::{name}" not in functions})


def _listed(files: dict[str, str]) -> list[dict[str, str]]:
    return [{"path": path, "content": text} for path, text in sorted(files.items())]
