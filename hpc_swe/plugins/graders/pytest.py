"""Grade a patch of plain files with pytest, in a fresh sandbox that no agent has touched.

The host applies the patch to the task's files, restores the files that set up pytest, and writes the task's
tests last, without their expected values (`_sealed`). For everything but an assertion with a literal, the
grader trusts the process in the sandbox, guarded by two canary tests. So weak tests prove little.
"""

import secrets
import time
from pathlib import PurePosixPath

import msgspec

from hpc_swe.errors import ConfigError
from hpc_swe.plugins import _pytest_command
from hpc_swe.plugins.graders._images import file_time_ns, require_pytest, require_unchanged
from hpc_swe.plugins.graders._report import KEY, verified_lines
from hpc_swe.plugins.graders._sealed import seal
from hpc_swe.plugins.graders.base import HiddenTestGrader, charges, ending, guard_text, sandbox_texts
from hpc_swe.plugins.patch import BadPatch, apply
from hpc_swe.plugins.sandboxes.base import CommandResult, Sandboxes, add_files
from hpc_swe.plugins.second_run import run_reliably
from hpc_swe.records import Score, Task

_SET_UP = {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"}
_SET_UP |= {"pyproject.toml", "sitecustomize.py", "usercustomize.py"}
_SEALED = "\n(pytest saw no expected values, which stay outside the sandbox; test_bad fails on purpose)"
_OUTCOMES = {"passed", "failed", "skipped"}
"""Outcomes of pytest itself; plugins that repeat a test report others for runs that do not count."""
_OPTIONS = ["-s", "--tb=no", "--assert=plain", "--rootdir=.", "--continue-on-collection-errors"]


class Pytest(HiddenTestGrader, frozen=True, kw_only=True):
    """A patch resolves a task when all fail-to-pass and pass-to-pass tests pass."""

    unresolved_reward: float = 0.0
    cheated_reward: float = -1.0
    sealed: bool = True
    """Whether expected values stay outside the sandbox. Turn it off where tests compare literals with values
    that are neither built in nor numpy's."""

    def grade(self, task: Task, patch: str, sandboxes: Sandboxes) -> Score:
        """Grade a patch; an empty one starts no sandbox."""
        if task.base_commit:
            raise ConfigError(f"[grader] pytest judges plain files; {task.task_id} is a repository")
        if not patch.strip():
            return Score(outcome="no_submission", reward=self.unresolved_reward)
        return self.examine(task, patch, sandboxes)

    def examine(self, task: Task, patch: str, sandboxes: Sandboxes) -> Score:
        started = time.monotonic()
        try:
            exam = _Exam(task, apply(task, patch), self.sealed)
        except BadPatch as error:
            return Score(outcome="unresolved", reward=self.unresolved_reward, detail=str(error))
        result, report = run_reliably(
            lambda: exam.run(sandboxes), lambda ended: ended[0].timed_out, task.tests.timeout_s
        )
        if not report.outcomes:  # the patch, or the image
            require_pytest(task, sandboxes)
        if charges(report.odd, {}, exam.touched):  # code that the patch does not change may do the same
            _, base = _Exam(task, dict(task.files), self.sealed).run(sandboxes)
            report = msgspec.structs.replace(report, charges=charges(report.odd, base.odd, exam.touched))
        detail = ending(result) + _SEALED * bool(exam.answers)
        return self._score(exam, report, detail, time.monotonic() - started)

    def _score(self, exam: "_Exam", report: "_Report", detail: str, seconds: float) -> Score:
        wanted = {*exam.task.tests.fail_to_pass, *exam.task.tests.pass_to_pass}
        passed = {name for name in wanted if exam.is_passed(name, report)}
        good, bad = (report.outcomes.get(f"{exam.canaries}::{name}") for name in ("test_good", "test_bad"))
        found = ["a canary test ended wrongly"] if good == "failed" or bad == "passed" else report.charges[:3]
        if found:
            detail = f"the patch changes how tests end: {'; '.join(found)}"
            return self.score(exam.task, "cheated", (), detail, seconds)
        is_resolved = bool(passed) and passed == wanted and good == "passed"
        return self.score(exam.task, "resolved" if is_resolved else "unresolved", passed, detail, seconds)


class _Line(msgspec.Struct, frozen=True):
    """A line of the report is a test's outcome, a test's answer, an oddity, or the end."""

    test: str = ""
    outcome: str = ""
    place: str = ""
    answer: str | None = None
    odd: str = ""
    """A part of pytest, unittest or the built-in functions that was still replaced when a test had ended."""
    young: str = ""
    """A file that is not believed, because it was made or changed since the guard began."""
    places: str = ""
    end: str = ""


class _Report(msgspec.Struct, frozen=True):
    """A report holds outcomes and answers of tests, as the process in the sandbox noted them."""

    outcomes: dict[str, str] = {}
    answers: dict[str, dict[int, str]] = {}
    odd: dict[str, list[str]] = {}
    """Signs that code changes how it is judged -> the files that they come from."""
    charges: list[str] = []
    """Signs that speak against the patch."""
    young: list[str] = []


_lines = msgspec.json.Decoder(_Line)


class _Exam:
    """An exam has the task as a sandbox gets it, and keeps the answers, which the sandbox does not get."""

    def __init__(self, task: Task, patched: dict[str, str], sealed: bool) -> None:
        self.task = task
        self.answers: dict[str, dict[int, str]] = {}
        self.canaries = f"test_{secrets.token_hex(8)}.py"
        files = {path: text for path, text in patched.items() if not _is_set_up(path)}
        self.touched = {path for path, text in files.items() if task.files.get(path) != text}
        self.touched -= task.tests.files.keys()
        files |= {path: text for path, text in task.files.items() if _is_set_up(path)} | task.tests.files
        judged = {name.partition("::")[0] for name in (*task.tests.fail_to_pass, *task.tests.pass_to_pass)}
        for path in judged & task.tests.files.keys() if sealed else ():
            module = seal(files[path])
            files[path] = module.text
            self.answers |= {f"{path}::{test}": answers for test, answers in module.answers.items()}
        number = secrets.randbelow(1000)
        files[self.canaries] = (
            f"def test_good():\n    assert {number} + 1 == {number + 1}\n\n\n"
            f"def test_bad():\n    assert {number} + 1 == {number + 2}\n"
        )
        self._task_in_sandbox = msgspec.structs.replace(task, files=files)
        given = [*_OPTIONS, *_pytest_command.arguments(task), self.canaries]
        self._arguments = [*_pytest_command.FEWER_PLUGINS, *given]

    def run(self, sandboxes: Sandboxes) -> tuple[CommandResult, _Report]:
        """Run the tests; the report is empty when they did not come to their end."""
        report_path, key = f".{secrets.token_hex(16)}", secrets.token_hex(16)
        files = [*self.task.tests.files, self.canaries]
        recorder = f"make_recorder(load_apart({guard_text()!r}), {report_path!r}, {files!r})"
        calls = f"RECORDER = {recorder}\nmain({self._arguments!r})\n"
        program = "\n\n".join([*sandbox_texts("_apart", "_hooks", "_runner"), calls])
        with sandboxes.open(self._task_in_sandbox) as sandbox:
            began_ns = file_time_ns()
            add_files(sandbox, {f"{report_path}{KEY}": key}, "write the key of a report")
            result = sandbox.python(program, self.task.tests.timeout_s)
            try:
                report = self._parse(verified_lines(sandbox.read(report_path), key))
            except (OSError, msgspec.MsgspecError, ValueError, RecursionError):  # the patch's code wrote it
                report = _Report()
            if report.odd:
                require_unchanged(self.task, sandboxes, report.young, began_ns)
        return result, report

    def _parse(self, lines: list[bytes]) -> _Report:
        """Return an empty report if the end is missing; a later line never undoes a test's failure."""
        entries, report = [_lines.decode(line) for line in lines], _Report()
        if not entries or not entries[-1].end:
            return report
        for line in entries:
            if line.answer is not None:
                report.answers.setdefault(line.test, {})[int(line.place)] = line.answer
            elif line.outcome in _OUTCOMES and report.outcomes.get(line.test, "passed") == "passed":
                report.outcomes[line.test] = line.outcome
            elif line.young:
                report.young.append(line.young)
            elif line.odd:
                report.odd.setdefault(line.odd.replace(self.canaries, ""), []).extend(line.places.split("\n"))
        return report

    def is_passed(self, name: str, report: _Report) -> bool:
        """Tell whether a test passed and gave the right answer wherever its expected value was taken out."""
        right = self.answers.get(name.partition("[")[0], {})
        return report.outcomes.get(name) == "passed" and report.answers.get(name, {}) == right


def _is_set_up(path: str) -> bool:
    """Tell whether a file could change how pytest or the interpreter starts."""
    name = PurePosixPath(path)
    return name.name in _SET_UP or name.suffix in {".pth", ".pyc", ".so"}
