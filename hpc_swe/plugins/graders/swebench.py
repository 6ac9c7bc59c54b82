"""Grader by swebench's own parsers and report, in a fresh sandbox of the task's image.

Nothing that the agent left comes along but its patch, and of that nothing which is a test, or which sets up
the test runner or the interpreter, unless the reference changes the same file. The tests come from the test
patch; that it still fits after the submission is looked at first, since the official script would run
without it.

What the tests print is no proof where our reporter runs (unittest and pytest, `_reporter`): it has its own
file, of which every line is sealed, the first and the last word in the run, and several canaries between the
tests. `_guard` sees who changes the parts of unittest and pytest, their plugins, the tests or the reporter;
what it saw counts as a cheat unless a run of the base commit is odd in the same way. What resolved is graded
again, also by tests that contradict the first ones (`_second_sitting`), since a patch can lie in memory.
docs/security.md says what was tried, docs/swebench.md what is believed all the same. Other parsers (sympy's,
those of other languages) read a log that code under test can print to.
"""

import dataclasses
import re
import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Literal

import msgspec

from hpc_swe.errors import ConfigError, SandboxError, boundary
from hpc_swe.plugins import Plugin
from hpc_swe.plugins.graders import _judge, _second_sitting, _swebench, _swebench_report
from hpc_swe.plugins.graders._again import settled
from hpc_swe.plugins.graders._swebench import ParsedRun, Run
from hpc_swe.plugins.graders.base import DISAGREES, SILENT, GradedPatch, Version
from hpc_swe.plugins.sandboxes.base import CommandResult, Sandbox, Sandboxes
from hpc_swe.records import Score, Task

SET_UP = ["conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"]
SET_UP += ["setup.py", "pyproject.toml", "sitecustomize.py", "usercustomize.py", ".gitattributes"]
SET_UP += ["*.pth", "*.pyc", "*.so", "*.dist-info/*", "*.egg-info/*", "*.egg-link"]
SET_UP += ["tests/*", "test/*", "testing/*", "e2e/*"]
"""Where tests and what runs them is set up. No reference of SWE-bench changes folders of these names."""
_STEP_S = 120.0
_MOST_BASES = 64
_bases: dict[tuple[bytes, str], ParsedRun] = {}
_bases_lock = threading.Lock()


class Swebench(Plugin, frozen=True, kw_only=True):
    """Resolved when all fail-to-pass and pass-to-pass tests pass."""

    resolved_reward: float = 1.0
    """Reward of an episode that passes all tests."""
    unresolved_reward: float = -1.0
    """Reward of one that does not."""
    cheated_reward: float = -1.0
    """Reward of one that cheated."""
    second_sittings: int = 5
    """How often what resolved is graded again, by the same or by changed tests; 0 is never."""

    def grade(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        """Judge a submission; an empty one starts nothing."""
        if not task.base_commit or "log_parser" not in task.tests.extra:
            raise ConfigError(f"[grader] swebench judges rows of SWE-bench; {task.task_id} is none")
        if not submission.strip():
            return Score(outcome="no_submission", reward=self.unresolved_reward)
        return self.examine(task, submission, sandboxes)

    def examine(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        """Run the tests whatever the submission is: the empty one shows that a task can be failed."""
        started = time.monotonic()
        test_run = settled(
            lambda: _run_tests(task, submission, sandboxes), lambda sat: sat.timed_out, task.tests.timeout_s
        )
        test_run = _weigh(task, test_run, sandboxes)
        score = self._score(task, submission, test_run, time.monotonic() - started)
        return self._again(task, submission, sandboxes, score) if score.outcome == "resolved" else score

    def changed_tests(self, task: Task, reference: str, sandboxes: Sandboxes) -> tuple[list[Version], str]:
        """Versions of the hidden tests that the reference fails; and why there are none."""
        if not self.second_sittings:
            return [], "grader.second_sittings = 0"
        texts = _test_files(task, sandboxes)
        sit = partial(self._tell, reference, sandboxes)
        return _second_sitting.choose(task, texts, sit, SystemRandom())

    def _again(self, task: Task, submission: str, sandboxes: Sandboxes, score: Score) -> Score:
        """The later sittings, which together end in one verdict."""
        started = time.monotonic()
        sit = partial(self._tell, submission, sandboxes)
        kind, why = _second_sitting.resat(task, self.second_sittings, sit)
        score = msgspec.structs.replace(score, seconds=score.seconds + time.monotonic() - started)
        if kind == "agrees":
            return score
        is_cheat = kind == "cheats"
        begins = {"cheats": "", "disagrees": f"{DISAGREES}: ", "silent": f"{SILENT}: "}[kind]
        return msgspec.structs.replace(
            score,
            outcome="cheated" if is_cheat else "unresolved",
            reward=self.cheated_reward if is_cheat else self.unresolved_reward,
            passed=[],
            failed=sorted({*score.passed, *score.failed}),
            detail=f"{begins}{why}",
        )

    def _tell(self, submission: str, sandboxes: Sandboxes, task: Task) -> _second_sitting.Told:
        """What a later sitting tells; what is odd of a run was weighed in the first."""
        test_run = settled(
            lambda: _run_tests(task, submission, sandboxes), lambda _: False, task.tests.timeout_s
        )
        parsed, run = test_run.parsed, Run(task)
        if parsed.complaint:
            why = f"{parsed.complaint}: {test_run.told}"
            return _second_sitting.Told(cheat=why if parsed.is_cheat else "", nothing=why)
        judged = dataclasses.replace(parsed, log=run.log_of(parsed, ParsedRun()))
        score = self._score(task, submission, dataclasses.replace(test_run, parsed=judged), 0.0)
        return _second_sitting.Told(passed=frozenset(score.passed), ended=run.ended(parsed))

    def report(self, folder: Path, label: str, model: str, verdicts: Sequence[GradedPatch]) -> None:
        """``report.<label>.json``, and the tree that swebench's own tools would have left below logs/."""
        _swebench_report.write(folder, label, model, verdicts)

    def _score(self, task: Task, submission: str, test_run: "_TestRun", seconds: float) -> Score:
        wanted = sorted({*task.tests.fail_to_pass, *task.tests.pass_to_pass})
        parsed = test_run.parsed
        if parsed.complaint:
            outcome: Literal["cheated", "unresolved"] = "cheated" if parsed.is_cheat else "unresolved"
            reward = self.cheated_reward if parsed.is_cheat else self.unresolved_reward
            detail = f"{parsed.complaint}: {test_run.told}"
            return Score(outcome=outcome, reward=reward, failed=wanted, detail=detail, seconds=seconds)
        verdict = _judge.report(task, submission, parsed.log)
        tests = verdict.get("tests_status", {}).values()
        passed = sorted({name for kind in tests for name in kind["success"]})
        return Score(
            outcome="resolved" if verdict["resolved"] else "unresolved",
            reward=self.resolved_reward if verdict["resolved"] else self.unresolved_reward,
            passed=passed,
            failed=[name for name in wanted if name not in passed],
            detail="" if verdict["resolved"] else verdict.get("complaint", test_run.told),
            seconds=seconds,
        )


@dataclass(frozen=True)
class _TestRun:
    """One run of the tests, and what it is taken for."""

    parsed: ParsedRun
    told: str = ""
    timed_out: bool = False
    touched: frozenset[str] = frozenset()
    """Files that the submission changes; the empty name is what is no file."""


def _weigh(task: Task, test_run: _TestRun, sandboxes: Sandboxes) -> _TestRun:
    """What is odd of a submission's run, unless a run of the base commit is odd in the same way."""
    parsed, run = test_run.parsed, Run(task)
    if parsed.complaint:
        return test_run
    always_equal, odd = (
        {what for what, places in told.items() if test_run.touched.intersection(places)}
        for told in (parsed.always_equal, parsed.odd)
    )
    base = ParsedRun()
    if always_equal or odd or run.leans_on_base(parsed):
        base = _base(task, "\n".join(name.partition(":")[0] for name in sorted(always_equal)), sandboxes)
    found = [f"values of {name} equal everything" for name in sorted(always_equal - base.always_equal.keys())]
    found += sorted(odd - base.odd.keys())
    if found:
        parsed = ParsedRun(complaint="; ".join(found[:3]), is_cheat=True)
    else:
        parsed = dataclasses.replace(parsed, log=run.log_of(parsed, base))
    return dataclasses.replace(test_run, parsed=parsed)


def _base(task: Task, modules: str, sandboxes: Sandboxes) -> ParsedRun:
    """What a run of the base commit comes to, in which these modules are imported as well.

    One that does not end excuses nothing: else a policy could choose tasks of which nothing can be known.
    """
    key = (msgspec.json.encode(task), modules)
    with _bases_lock:
        known = _bases.get(key)
    if known is None:
        known = _run_tests(task, "", sandboxes, modules).parsed
        if not known.complaint:
            with _bases_lock:
                while len(_bases) >= _MOST_BASES:
                    del _bases[next(iter(_bases))]
                _bases[key] = known
    return known


def _run_tests(task: Task, submission: str, sandboxes: Sandboxes, also: str = "") -> _TestRun:
    """Lay the submission into a fresh sandbox and run the task's script there."""
    run = Run(task, also=also)
    with sandboxes.open(task) as sandbox:
        _untouched(task, run, sandbox)
        _lay(sandbox, {f"{run.folder}.patch": submission})
        options = _swebench.excluded(task, SET_UP)
        git = f"git apply --whitespace=nowarn {run.folder}.patch"
        apply = f"{git} --numstat -z > {run.touched} && {git} {options} && " if submission.strip() else ""
        applied = sandbox.run(f"{apply}{_fits(run)}", _STEP_S)
        if applied.timed_out or applied.broke_sandbox:  # none of the submission has run
            raise SandboxError(f"the submission to {task.task_id} was not applied: {_told(applied)}")
        if applied.exit_code:
            return _TestRun(ParsedRun(complaint="the submission does not fit the task"), _told(applied))
        touched = frozenset(
            re.findall(r"\t([^\t\0]+)\0", _read(sandbox, run.touched).decode(errors="replace"))
        )
        _lay(sandbox, run.files())
        result = sandbox.run(run.command(), task.tests.timeout_s)
        log = _read(sandbox, run.log).decode(errors="replace")
        if result.timed_out:
            return _TestRun(ParsedRun(complaint="timed out"), log[-500:], timed_out=True)
        parsed = run.parse(_read(sandbox, run.book), log)
    return _TestRun(parsed, f"{_told(result)} {log.strip()[-500:]}", touched=touched | {""})


def _test_files(task: Task, sandboxes: Sandboxes) -> dict[str, str]:
    """Path -> text of each test file in Python, as the test patch leaves it."""
    run = Run(task)
    with sandboxes.open(task) as sandbox:
        _untouched(task, run, sandbox)
        sandbox.run(f"git apply --whitespace=nowarn {run.folder}.tests", _STEP_S)
        paths = msgspec.json.decode(task.tests.extra["test_files"], type=list[str])
        return {path: _read(sandbox, path).decode(errors="replace") for path in paths if path.endswith(".py")}


def _untouched(task: Task, run: Run, sandbox: Sandbox) -> None:
    """The image holds the base commit, and the tests fit it; what is wrong here is nobody's submission.

    Raises:
        SandboxError: The image is not the task's.
    """
    _lay(sandbox, {f"{run.folder}.tests": task.tests.extra["test_patch"]})
    commit = shlex.quote(f"{task.base_commit}^{{commit}}")
    looked = sandbox.run(f"git cat-file -e {commit} && {_fits(run)}", _STEP_S)
    if looked.exit_code:
        raise SandboxError(
            f"image {task.image} is not that of {task.task_id}: commit {task.base_commit} is missing, or the "
            f"test patch does not fit: {_told(looked)}; build it with hpc_swe/tasks/build_images.py"
        )


def _fits(run: Run) -> str:
    return f"git apply --check --whitespace=nowarn {run.folder}.tests"


def _lay(sandbox: Sandbox, files: dict[str, str]) -> None:
    """Files of ours, before anything of the submission has run."""
    with boundary(SandboxError, "lay out a grading"):
        for path, text in files.items():
            sandbox.write(path, text.encode())


def _read(sandbox: Sandbox, path: str) -> bytes:
    """A file of ours; nothing when it is missing or too large, since then the tests made it so."""
    try:
        return sandbox.read(path)
    except OSError:
        return b""


def _told(result: CommandResult) -> str:
    state = "broke its sandbox; " if result.broke_sandbox else ""
    return f"{state}exit code {result.exit_code}: {result.output.strip()[-500:]}"
