"""Grade a patch with swebench's own parsers and report, in a fresh sandbox of the task's image.

Only the agent's patch enters that sandbox. The parts that change tests, or that set up the test runner or the
interpreter, are left out, unless the reference changes the same file. The tests come from the test patch; the
grader first checks that it applies after the agent's patch, since the official script would run without it.

Where our reporter runs (unittest and pytest, `_inside`), the printed output of tests is not trusted. The
reporter writes a file whose every line is signed, opens and closes the run, and puts several canary tests
between the tests. The guard detects changes to unittest and pytest, their plugins, the tests or the reporter;
these count as cheating unless a run of the base commit shows the same oddity. A patch that resolves the task
is graded again, also with tests that contradict the first ones (`_changed_tests`), since a patch can lie in
memory. docs/security.md lists the attacks that were tried, docs/rewards.md what is trusted all the same.
Other parsers (sympy's, those of other languages) read a log that code under test can print to.
"""

import dataclasses
import hashlib
import math
import re
import shlex
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import ClassVar

import msgspec

from hpc_swe.agents.sandboxes.base import Sandbox, Sandboxes, add_files
from hpc_swe.base.errors import ConfigError, SandboxError
from hpc_swe.base.records import Outcome, Score, Task
from hpc_swe.tasks.graders import _judge, _swebench, _swebench_report
from hpc_swe.tasks.graders._changed_tests import retest
from hpc_swe.tasks.graders._hidden import completed
from hpc_swe.tasks.graders._images import file_time_ns, require_unchanged
from hpc_swe.tasks.graders._inside.texts import sandbox_texts
from hpc_swe.tasks.graders._swebench import ParsedRun, Run
from hpc_swe.tasks.graders.base import (
    DISAGREES,
    SILENT,
    GradedPatch,
    HiddenTestGrader,
    charges,
    ending,
)
from hpc_swe.tasks.hidden_tests import Version, with_edits
from hpc_swe.tasks.patch_text import normalised
from hpc_swe.tasks.second_run import run_reliably
from hpc_swe.tasks.swebench_rows import SET_UP
from hpc_swe.tasks.swebench_rows import added as added_lines

_STEP_S = 120.0
_WRITING = "write the files of a grading"
_MOST_BASES, _MOST_TRIES = 64, 3
_EMPTY_S = 3600.0
_bases: dict[bytes, tuple[ParsedRun, float]] = {}
"""Base commit and modules -> what a run showed, and the end of its use on the monotonic clock."""
_tries: Counter[bytes] = Counter()
"""Runs of a base commit that showed nothing. After some of them that is believed for an hour: what hinders a
host may last, and then end."""
_supports: dict[tuple[object, ...], tuple[str, ...]] = {}
"""Task -> the modules that only its tests import."""
_bases_lock = threading.Lock()


@dataclass(frozen=True)
class _TestRun:
    """A test run has a parsed result and the end of its output."""

    parsed: ParsedRun
    output: str = ""
    timed_out: bool = False
    touched: frozenset[str] = frozenset()
    """Files that the patch changes, and the empty name, which stands for code that is in no file."""


class Swebench(HiddenTestGrader, frozen=True, kw_only=True):
    """A patch resolves a task when all fail-to-pass and pass-to-pass tests pass."""

    reports_outcomes: ClassVar[bool] = True
    second_sittings: int = 5
    """How often a resolving patch is graded again, with the same or with changed tests; 0 is never."""

    def grade(self, task: Task, patch: str, sandboxes: Sandboxes) -> Score:
        """Grade a patch; an empty one starts no sandbox."""
        if not task.base_commit or "log_parser" not in task.tests.extra:
            raise ConfigError(f"[grader] swebench judges rows of SWE-bench; {task.task_id} is none")
        if not patch.strip():
            return Score(outcome="no_submission", reward=self.unresolved_reward)
        return self.examine(task, patch, sandboxes)

    def examine(self, task: Task, patch: str, sandboxes: Sandboxes) -> Score:
        """Grade a patch and run the tests even when it is empty, which shows that a task can be failed."""
        started = time.monotonic()
        task = completed(task, sandboxes)
        planned, early = retest.plan(task, self.second_sittings), None
        run_later = partial(self._run_later, patch, sandboxes)
        if planned.early and patch.strip():
            early = run_later(with_edits(task, planned.early.edits))
        test_run, base = _run_and_accuse(task, patch, sandboxes)
        score = self._score(task, patch, test_run, base, time.monotonic() - started)
        if score.outcome != "resolved":
            return score
        finding, why = retest.regrade(task, planned, early, run_later)
        return self._regraded(task, score, (finding, why), time.monotonic() - started)

    def outcomes(self, task: Task, patch: str, sandboxes: Sandboxes) -> tuple[dict[str, str], str]:
        """Return how each test ended, whether or not the task names it; or nothing and the reason."""
        test_run, _ = _run_and_accuse(completed(task, sandboxes), patch, sandboxes)
        if test_run.parsed.complaint:
            return {}, f"{test_run.parsed.complaint}: {test_run.output}"
        return _swebench.by_name_in_logs(test_run.parsed), ""

    def complete(self, task: Task, sandboxes: Sandboxes) -> Task:
        """Return the task with its hidden tests, which may be those of its image."""
        return completed(task, sandboxes)

    def changed_tests(self, task: Task, reference: str, sandboxes: Sandboxes) -> tuple[list[Version], str]:
        """Return versions of the hidden tests that the reference fails; or none and the reason."""
        if not self.second_sittings:
            return [], "grader.second_sittings = 0"
        task = completed(task, sandboxes)
        texts = _test_files(task, sandboxes)
        run_tests = partial(self._run_later, reference, sandboxes)
        return retest.choose_versions(task, texts, run_tests, SystemRandom())

    def _regraded(self, task: Task, score: Score, found: tuple[retest.Finding, str], seconds: float) -> Score:
        finding, why = found
        score = msgspec.structs.replace(score, seconds=seconds)
        if finding == "agrees":
            return score
        prefix = {"cheats": "", "disagrees": f"{DISAGREES}: ", "silent": f"{SILENT}: "}[finding]
        outcome: Outcome = "cheated" if finding == "cheats" else "unresolved"
        score = self.score(task, outcome, (), f"{prefix}{why}", score.seconds)
        # A lie that is told in the first run alone never meets a changed test, so it must not be cheaper.
        reward = self.unresolved_reward if finding == "silent" else self.cheated_reward
        return msgspec.structs.replace(score, reward=reward)

    def _run_later(self, patch: str, sandboxes: Sandboxes, task: Task) -> retest.RetestResult:
        """Run one retest. Its oddities are not looked at: those of the first run were."""
        test_run = run_reliably(
            lambda: _run_tests(task, patch, sandboxes), lambda _: False, task.tests.timeout_s
        )
        parsed = test_run.parsed
        if parsed.complaint:
            why = f"{parsed.complaint}: {test_run.output}"
            return retest.RetestResult(cheat=why if parsed.is_cheat else "", failure=why)
        score = self._score(task, patch, test_run, ParsedRun(), 0.0)
        return retest.RetestResult(passed=frozenset(score.passed), ended=Run(task).ended(parsed))

    def report(self, folder: Path, label: str, model: str, verdicts: Sequence[GradedPatch]) -> None:
        """Write ``report.<label>.json`` and the tree that swebench's own tools would write below logs/."""
        _swebench_report.write(folder, label, model, verdicts)

    def _score(self, task: Task, patch: str, test_run: _TestRun, base: ParsedRun, seconds: float) -> Score:
        parsed = test_run.parsed
        if parsed.complaint:
            detail = f"{parsed.complaint}: {test_run.output}"
            return self.score(task, "cheated" if parsed.is_cheat else "unresolved", (), detail, seconds)
        verdict = _judge.report(task, patch, Run(task).log_of(parsed, base))
        passed = {name for kind in verdict.get("tests_status", {}).values() for name in kind["success"]}
        differing = _swebench.differing(task, parsed)
        detail = differing or verdict.get("complaint", test_run.output)
        outcome: Outcome = "resolved" if verdict["resolved"] and not differing else "unresolved"
        return self.score(task, outcome, passed, detail, seconds)


def _run_and_accuse(task: Task, patch: str, sandboxes: Sandboxes) -> tuple[_TestRun, ParsedRun]:
    """Run the tests once, or twice when the host may have spoiled the first run.

    Call the run a cheat for its oddities, unless a run of the base commit, also returned, shows the same.
    """
    test_run = run_reliably(
        lambda: _run_tests(task, patch, sandboxes), lambda run: run.timed_out, task.tests.timeout_s
    )
    parsed, base = test_run.parsed, ParsedRun()
    if parsed.complaint:
        return test_run, base
    touched = test_run.touched
    always_equal = charges(parsed.always_equal, {}, touched)
    if always_equal or charges(parsed.odd, {}, touched) or Run(task).needs_base(parsed):
        base = _base(task, "\n".join(name.partition(":")[0] for name in always_equal), sandboxes)
    values = [name for name in always_equal if name not in base.always_equal]
    found = [f"values of {name} equal everything" for name in values]
    found += charges(parsed.odd, base.odd, touched)
    if found:
        parsed = ParsedRun(complaint="; ".join(found[:3]), is_cheat=True)
    return dataclasses.replace(test_run, parsed=parsed), base


def _base(task: Task, modules: str, sandboxes: Sandboxes) -> ParsedRun:
    """Run the tests on the base commit and import these modules, one a line, at the end; cache the result."""
    # A run that does not end excuses no oddity: a policy could choose tasks on which nothing is found out.
    key = hashlib.sha256(msgspec.json.encode((task, modules))).digest()
    with _bases_lock:
        known, end = _bases.get(key, (ParsedRun(), 0.0))
    if time.monotonic() >= end:
        run = run_reliably(
            lambda: _run_tests(task, "", sandboxes, modules), lambda run: run.timed_out, task.tests.timeout_s
        )
        known = run.parsed
        with _bases_lock:
            _tries[key] += 1
            is_empty = bool(known.complaint and not known.odd)
            if not is_empty or _tries[key] >= _MOST_TRIES:
                while len(_bases) >= _MOST_BASES:
                    del _bases[next(iter(_bases))]
                _bases[key] = known, time.monotonic() + _EMPTY_S if is_empty else math.inf
                del _tries[key]
    return known


def _run_tests(task: Task, patch: str, sandboxes: Sandboxes, modules: str = "") -> _TestRun:
    run = Run(task, modules=modules)
    with sandboxes.open(task) as sandbox:
        began_ns = file_time_ns()
        _check_image(task, run, sandbox)
        add_files(sandbox, {f"{run.folder}.patch": normalised(patch)}, _WRITING)
        support = _support_files(task, run, sandbox) if patch.strip() else ()
        options = _swebench.apply_options(task, SET_UP, support)
        git = f"git apply --whitespace=nowarn {run.folder}.patch"
        apply = f"{git} --numstat -z > {run.folder}.touched && {git} {options} && " if patch.strip() else ""
        applied = sandbox.run(f"{apply}{_check_tests(run)}", _STEP_S)
        if applied.timed_out or applied.broke_sandbox:  # no code of the patch has run
            raise SandboxError(f"the patch for {task.task_id} was not applied: {ending(applied)}")
        if applied.exit_code:
            return _TestRun(ParsedRun(complaint="the patch does not fit the task"), ending(applied))
        listed = _read(sandbox, f"{run.folder}.touched").decode(errors="replace")
        touched = frozenset(re.findall(r"\t([^\t\0]+)\0", listed))
        add_files(sandbox, run.files(), _WRITING)
        result = sandbox.run(
            f'bash "$PWD/{run.folder}/eval.sh" > {run.folder}.log 2>&1', task.tests.timeout_s
        )
        log = _read(sandbox, f"{run.folder}.log").decode(errors="replace")
        if result.timed_out:
            return _TestRun(ParsedRun(complaint="timed out"), log[-500:], timed_out=True)
        parsed = run.parse(_read(sandbox, f"{run.folder}.report"), log)
        if parsed.odd:  # also in a run of the base commit, whose signs excuse those of a patch
            require_unchanged(task, sandboxes, parsed.young, began_ns)
    return _TestRun(parsed, f"{ending(result)} {log.strip()[-500:]}", touched=touched | {""})


def _test_files(task: Task, sandboxes: Sandboxes) -> dict[str, str]:
    run = Run(task)
    with sandboxes.open(task) as sandbox:
        _check_image(task, run, sandbox)
        sandbox.run(f"git apply --whitespace=nowarn {run.folder}.tests", _STEP_S)
        paths = msgspec.json.decode(task.tests.extra["test_files"], type=list[str])
        return {path: _read(sandbox, path).decode(errors="replace") for path in paths if path.endswith(".py")}


def _support_files(task: Task, run: Run, sandbox: Sandbox) -> tuple[str, ...]:
    """Find the modules that only tests import, in a sandbox without any patch; cache the result."""
    solved, patterns = _swebench.solved_files(task), _swebench.test_paths(task)
    key = (task.image, task.base_commit, task.start, task.tests.extra["test_files"], *solved, "", *patterns)
    with _bases_lock:
        known = _supports.get(key)
    if known is None:
        added = added_lines(task.tests.extra["test_patch"])
        hidden = {path: "".join(lines) for path, lines in added if path.endswith(".py")}
        listed = f"{run.folder}.support"
        (text,) = sandbox_texts("support")
        sandbox.run(f"git ls-files -z > {listed}", _STEP_S)
        done = sandbox.python(f"{text}\n\nmain{(listed, hidden, patterns, solved)!r}\n", _STEP_S)
        found = _read(sandbox, listed)
        if done.exit_code or not found:
            raise SandboxError(f"the modules of {task.task_id} were not listed: {ending(done)}")
        known = tuple(msgspec.json.decode(found, type=list[str]))
        with _bases_lock:
            _supports[key] = known
    return known


def _check_image(task: Task, run: Run, sandbox: Sandbox) -> None:
    """Raise SandboxError, which blames no agent, unless the image has the base commit and fits the tests."""
    add_files(sandbox, {f"{run.folder}.tests": task.tests.extra["test_patch"]}, _WRITING)
    commit = shlex.quote(f"{'HEAD' if task.start else task.base_commit}^{{commit}}")
    checked = sandbox.run(f"git cat-file -e {commit} && {_check_tests(run)}", _STEP_S)
    if checked.exit_code:
        raise SandboxError(
            f"image {task.image} is not that of {task.task_id}: commit {task.base_commit} is missing, or the "
            f"test patch does not fit: {ending(checked)}; build it with hpc_swe/makers/build_images.py"
        )


def _check_tests(run: Run) -> str:
    return f"git apply --check --whitespace=nowarn {run.folder}.tests"


def _read(sandbox: Sandbox, path: str) -> bytes:
    """Read a file of the grader; return nothing when the tests have removed it or made it too large."""
    try:
        return sandbox.read(path)
    except OSError:
        return b""
