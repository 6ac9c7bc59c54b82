"""Grader by pytest, in a fresh sandbox that no agent has touched.

The submission is laid over the task's files on the host, what it says of pytest's own set-up is thrown
away, and the task's tests come last, in disguise (`_twins`). What the tests compare is beyond us: a test
that asks little proves little.
"""

import secrets
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import msgspec

from hpc_swe.errors import ConfigError
from hpc_swe.plugins import Plugin
from hpc_swe.plugins.agents.submission import BadSubmission, apply
from hpc_swe.plugins.graders._twins import Disguise, canaries, disguise
from hpc_swe.plugins.sandboxes.base import CommandResult, Sandboxes
from hpc_swe.plugins.tools import _pytest
from hpc_swe.records import Score, Task

_RUNNER = Path(__file__).with_name("_runner.py")
_SET_UP = {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"}
_SET_UP |= {"pyproject.toml", "sitecustomize.py", "usercustomize.py"}
_OPTIONS = ["-s", "--tb=no", "--assert=plain", "--rootdir=.", "--continue-on-collection-errors"]
_one_by_one = threading.Lock()


class Pytest(Plugin, frozen=True, kw_only=True):
    """All fail-to-pass and pass-to-pass tests must pass, and none together with its twin."""

    resolved_reward: float = 1.0
    unresolved_reward: float = 0.0
    cheated_reward: float = 0.0
    twins: int = 2
    """Copies of each test that ask for something else; 0 where a test changes what the next one sees."""
    own_equality: bool = False
    """Whether values that tests compare with literals may bring an ``__eq__`` written in Python."""

    def grade(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        """Judge a submission.

        Raises:
            SandboxError: The host failed.
            ConfigError: The task is not one of plain files and a pytest command.
        """
        if task.base_commit:
            raise ConfigError(f"[grader] pytest judges plain files; {task.task_id} is a repository")
        if not submission.strip():
            return Score(outcome="no_submission", reward=self.unresolved_reward)
        started = time.monotonic()
        try:
            exam = _Exam.of(task, apply(task, submission), self)
        except BadSubmission as error:
            return Score(outcome="unresolved", reward=self.unresolved_reward, detail=str(error))
        result, outcomes = exam.sit(sandboxes)
        if result.timed_out:
            with _one_by_one:
                result, outcomes = exam.sit(sandboxes)
        return self._score(task, exam, outcomes, _told(result), time.monotonic() - started)

    def _score(
        self, task: Task, exam: "_Exam", outcomes: dict[str, str], detail: str, seconds: float
    ) -> Score:
        wanted = sorted({*task.tests.fail_to_pass, *task.tests.pass_to_pass})
        passed = exam.passed(outcomes)
        failed = [name for name in wanted if name not in passed]
        cheat = exam.cheat(outcomes)
        if cheat:
            return Score(
                outcome="cheated", reward=self.cheated_reward, failed=wanted, detail=cheat, seconds=seconds
            )
        resolved = bool(wanted) and not failed and exam.canary in passed
        return Score(
            outcome="resolved" if resolved else "unresolved",
            reward=self.resolved_reward if resolved else self.unresolved_reward,
            passed=[name for name in wanted if name in passed],
            failed=failed,
            detail="" if resolved else detail,
            seconds=seconds,
        )


@dataclass
class _Exam:
    """The task as a sandbox sees it, and what only the grader knows of it."""

    task: Task
    arguments: list[str]
    canary: str = ""
    """The test of ours that must pass."""
    names: dict[str, str] = field(default_factory=dict)
    """Disguised test id -> the real one."""
    families: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, task: Task, submitted: dict[str, str], grader: Pytest) -> "_Exam":
        """Tests in new disguise over the submitted files."""
        files = {path: text for path, text in submitted.items() if not _is_set_up(path)}
        files |= {path: text for path, text in task.files.items() if _is_set_up(path)} | task.tests.files
        judged = {name.partition("::")[0] for name in (*task.tests.fail_to_pass, *task.tests.pass_to_pass)}
        exam = cls(task, arguments=[])
        for path in judged & task.tests.files.keys():
            files[path] = exam._add(path, disguise(files[path], grader.twins, grader.own_equality))
        path = f"test_{secrets.token_hex(8)}.py"
        files[path] = exam._add(path, canaries())
        exam.canary = exam.names[next(name for name in exam.names if name.startswith(path))]
        exam.arguments = [*_pytest.off(), *_OPTIONS, *_pytest.arguments(task), path]
        exam.task = msgspec.structs.replace(task, files=files)
        return exam

    def _add(self, path: str, hidden: Disguise) -> str:
        self.names |= {f"{path}::{name}": f"{path}::{real}" for name, real in hidden.names.items()}
        self.families += [[f"{path}::{name}" for name in family] for family in hidden.families]
        return hidden.text

    def sit(self, sandboxes: Sandboxes) -> tuple[CommandResult, dict[str, str]]:
        """Run the tests; outcomes by disguised id, none when the run did not come to its end."""
        result_path = f".{secrets.token_hex(16)}"
        program = f"{_RUNNER.read_text()}\n\nmain({result_path!r}, {self.arguments!r})\n"
        with sandboxes.open(self.task) as sandbox:
            result = sandbox.python(program, self.task.tests.timeout_s)
            try:
                outcomes = msgspec.json.decode(sandbox.read(result_path), type=dict[str, str])
            except (OSError, msgspec.MsgspecError):
                outcomes = {}
        return result, outcomes

    def passed(self, outcomes: dict[str, str]) -> set[str]:
        """Real ids of the tests that passed; a twin's is never among them."""
        split = [name.partition("[") for name, outcome in outcomes.items() if outcome == "passed"]
        return {self.names.get(test, test) + bracket + parameters for test, bracket, parameters in split}

    def cheat(self, outcomes: dict[str, str]) -> str:
        """What gives a cheat away, or nothing."""
        split = [name.partition("[") for name, outcome in outcomes.items() if outcome == "passed"]
        family = {name: number for number, names in enumerate(self.families) for name in names}
        alike = Counter((family[test], parameters) for test, _, parameters in split if test in family)
        if any(count > 1 for count in alike.values()):
            return "passed a test and its twin, which cannot both be right"
        canary = next(name for name, real in self.names.items() if real == self.canary)
        return "failed a test that cannot fail" if outcomes.get(canary) == "failed" else ""


def _is_set_up(path: str) -> bool:
    """Whether a file could change how pytest or the interpreter starts."""
    name = PurePosixPath(path)
    return name.name in _SET_UP or name.suffix in {".pth", ".pyc", ".so"}


def _told(result: CommandResult) -> str:
    state = "timed out; " if result.timed_out else "broke its sandbox; " if result.broke_sandbox else ""
    return f"{state}exit code {result.exit_code}: {result.output.strip()[-500:]}"
