"""Grader by pytest, in a fresh sandbox that no agent has touched.

The submission is laid over the task's files on the host, what it says of pytest's own set-up is thrown
away, and the task's tests come last, without their answers (`_sealed`). What is not an assertion with a
literal is believed to the process, but for two canaries. A test that asks little proves little.
"""

import re
import secrets
import time
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from hpc_swe.errors import ConfigError
from hpc_swe.plugins import Plugin, _pytest_command
from hpc_swe.plugins.graders._again import settled
from hpc_swe.plugins.graders._report import unsealed
from hpc_swe.plugins.graders._sealed import seal
from hpc_swe.plugins.patch import BadSubmission, apply
from hpc_swe.plugins.sandboxes.base import CommandResult, Sandboxes
from hpc_swe.records import Score, Task

_TEXTS = [Path(__file__).with_name(name) for name in ("_guard.py", "_report.py", "_runner.py")]
_SET_UP = {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"}
_SET_UP |= {"pyproject.toml", "sitecustomize.py", "usercustomize.py"}
_OPTIONS = ["-s", "--tb=no", "--assert=plain", "--rootdir=.", "--continue-on-collection-errors"]


class Pytest(Plugin, frozen=True, kw_only=True):
    """All fail-to-pass and pass-to-pass tests must pass."""

    resolved_reward: float = 1.0
    """Reward of an episode that passes all tests."""
    unresolved_reward: float = 0.0
    """Reward of one that does not."""
    cheated_reward: float = 0.0
    """Reward of one that cheated."""
    sealed: bool = True
    """Off where tests compare literals with values that are neither built in nor numpy's."""

    def grade(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        """Judge a submission."""
        if task.base_commit:
            raise ConfigError(f"[grader] pytest judges plain files; {task.task_id} is a repository")
        if not submission.strip():
            return Score(outcome="no_submission", reward=self.unresolved_reward)
        return self.examine(task, submission, sandboxes)

    def examine(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        """Run the tests whatever the submission is."""
        started = time.monotonic()
        try:
            exam = _Exam(task, apply(task, submission), self.sealed)
        except BadSubmission as error:
            return Score(outcome="unresolved", reward=self.unresolved_reward, detail=str(error))
        result, report = settled(
            lambda: exam.sit(sandboxes), lambda sat: sat[0].timed_out, task.tests.timeout_s
        )
        return self._score(exam, report, _told(result), time.monotonic() - started)

    def _score(self, exam: "_Exam", report: "_Report", detail: str, seconds: float) -> Score:
        wanted = sorted({*exam.task.tests.fail_to_pass, *exam.task.tests.pass_to_pass})
        failed = [name for name in wanted if not exam.is_passed(name, report)]
        passed = [name for name in wanted if name not in failed]
        good, bad = (report.outcomes.get(f"{exam.canaries}::{name}") for name in ("test_good", "test_bad"))
        outcome: Literal["resolved", "unresolved", "cheated"] = "unresolved"
        reward = self.unresolved_reward
        if good == "failed" or bad == "passed":
            outcome, reward, passed, failed = "cheated", self.cheated_reward, [], wanted
            detail = "a canary died: the submission changes how tests end"
        elif report.odd:
            outcome, reward, passed, failed = "cheated", self.cheated_reward, [], wanted
            detail = f"the submission changes how tests end: {'; '.join(report.odd[:3])}"
        elif passed and not failed and good == "passed":
            outcome, reward, detail = "resolved", self.resolved_reward, ""
        return Score(
            outcome=outcome, reward=reward, passed=passed, failed=failed, detail=detail, seconds=seconds
        )


class _Line(msgspec.Struct, frozen=True):
    """One of the report's."""

    test: str = ""
    outcome: str = ""
    place: str = ""
    answer: str | None = None
    odd: str = ""
    """A part of pytest, unittest or the built-in functions that was still replaced when a test had ended."""
    places: str = ""
    end: str = ""


class _Report(msgspec.Struct, frozen=True):
    """What the process in the sandbox says."""

    outcomes: dict[str, str] = {}
    answers: dict[str, dict[int, str]] = {}
    odd: list[str] = []


_lines = msgspec.json.Decoder(_Line)


class _Exam:
    """The task as a sandbox sees it, and the answers, which it does not see."""

    def __init__(self, task: Task, submitted: dict[str, str], sealed: bool) -> None:
        self.task = task
        self.answers: dict[str, dict[int, str]] = {}
        self.canaries = f"test_{secrets.token_hex(8)}.py"
        files = {path: text for path, text in submitted.items() if not _is_set_up(path)}
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
        self._laid = msgspec.structs.replace(task, files=files)
        self._arguments = [
            *_pytest_command.disabling_options(),
            *_OPTIONS,
            *_pytest_command.arguments(task),
            self.canaries,
        ]

    def sit(self, sandboxes: Sandboxes) -> tuple[CommandResult, _Report]:
        """Run the tests; the report is empty when they did not come to their end."""
        report_path, key = f".{secrets.token_hex(16)}", secrets.token_hex(16)
        texts = (re.sub(r"(?m)^from hpc_swe.*$", "", path.read_text()) for path in _TEXTS)
        words = (report_path, key, [*self.task.tests.files, self.canaries], self._arguments)
        program = "\n\n".join([*texts, f"main{words!r}\n"])
        with sandboxes.open(self._laid) as sandbox:
            result = sandbox.python(program, self.task.tests.timeout_s)
            try:
                report = self._reported(unsealed(sandbox.read(report_path), key) or [])
            except (OSError, msgspec.MsgspecError, ValueError, RecursionError):  # the submission wrote it
                report = _Report()
        return result, report

    def _reported(self, lines: list[bytes]) -> _Report:
        """Nothing without an end; what is noted last of a test does not undo a failure."""
        entries, report = [_lines.decode(line) for line in lines], _Report()
        if not entries or not entries[-1].end:
            return report
        for one in entries:
            if one.answer is not None:
                report.answers.setdefault(one.test, {})[int(one.place)] = one.answer
            elif one.outcome and report.outcomes.get(one.test, "passed") == "passed":
                report.outcomes[one.test] = one.outcome
            elif one.odd and not self._is_well(one):
                report.odd.append(one.odd)
        return report

    def _is_well(self, line: _Line) -> bool:
        """Tests are from their files, libraries from outside; only tests must not be written anew."""
        files = {*self.task.tests.files, self.canaries}
        if line.odd.startswith("writes "):
            return line.odd.removeprefix("writes ") not in files
        return all(place[:1] == "/" or place in files for place in line.places.split("\n"))

    def is_passed(self, name: str, report: _Report) -> bool:
        """Whether a test ended well, and every answer that was taken out of it is right."""
        right = self.answers.get(name.partition("[")[0], {})
        return report.outcomes.get(name) == "passed" and report.answers.get(name, {}) == right


def _is_set_up(path: str) -> bool:
    """Whether a file could change how pytest or the interpreter starts."""
    name = PurePosixPath(path)
    return name.name in _SET_UP or name.suffix in {".pth", ".pyc", ".so"}


def _told(result: CommandResult) -> str:
    state = "timed out; " if result.timed_out else "broke its sandbox; " if result.broke_sandbox else ""
    return f"{state}exit code {result.exit_code}: {result.output.strip()[-500:]}"
