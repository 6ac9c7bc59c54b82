"""An exam is a task as a sandbox gets it, with a patch or without, and the answers, which no sandbox gets."""

import math
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import PurePosixPath

import msgspec

from hpc_swe.agents import pytest_command
from hpc_swe.agents.sandboxes.base import CommandResult, Sandboxes, add_files
from hpc_swe.base.records import Task
from hpc_swe.base.syntax import parse
from hpc_swe.tasks.graders._images import file_time_ns, require_unchanged
from hpc_swe.tasks.graders._inside.origins import bound_names
from hpc_swe.tasks.graders._inside.report import KEY, verified_lines
from hpc_swe.tasks.graders._inside.texts import guard_text, sandbox_texts
from hpc_swe.tasks.graders._sealing.answers import Check
from hpc_swe.tasks.graders._sealing.sealed import Sealed, seal
from hpc_swe.tasks.second_run import run_reliably
from hpc_swe.tasks.visible_tests import ids_of_tests

SET_UP = {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"}
SET_UP |= {"pyproject.toml", "sitecustomize.py", "usercustomize.py"}
_OUTCOMES = {"passed", "failed", "skipped"}
"""Outcomes of pytest itself; plugins that repeat a test report others for runs that do not count."""
_OPTIONS = ["-s", "--assert=plain", "--continue-on-collection-errors"]
_NO_TRACEBACKS = "--tb=no"
"""It overrides a task's own style, for which pytest would parse the files of each traceback anew."""


class _Line(msgspec.Struct, frozen=True):
    """A line of the report is a test's outcome, a test's answer, an oddity, or the end."""

    test: str = ""
    outcome: str = ""
    place: str = ""
    answer: str | None = None
    odd: str = ""
    """A part of pytest, unittest or the built-in functions that was still replaced when a test had ended."""
    always_equal: str = ""
    """A class whose values equal nearly everything."""
    young: str = ""
    """A file that is not believed, because it was made or changed since the guard began."""
    places: str = ""
    end: str = ""


class TestReport(msgspec.Struct, frozen=True):
    """A report holds outcomes and answers of tests, as the process in the sandbox noted them."""

    __test__ = False  # pytest must not collect this class

    collected: list[str] = []
    """Ids of the tests that pytest found."""
    outcomes: dict[str, str] = {}
    answers: dict[str, dict[int, list[str]]] = {}
    """Test -> number -> answers, of which a loop gives several."""
    odd: dict[str, list[str]] = {}
    """Signs that code changes how it is judged -> the files that they come from."""
    always_equal: dict[str, list[str]] = {}
    """Classes whose values equal nearly everything -> the files that they come from."""
    young: list[str] = []
    has_end: bool = False
    """Whether the run came to its end."""


_lines = msgspec.json.Decoder(_Line)


@dataclass(frozen=True)
class _Answers:
    """The tests of all files together must record these answers."""

    checks: Mapping[int, Check] = field(default_factory=dict)
    required: Mapping[str, frozenset[int]] = field(default_factory=dict)
    shared: Mapping[str, frozenset[int]] = field(default_factory=dict)
    places: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Number -> file and place of the assertion."""


Places = frozenset[tuple[str, str]]
"""Assertions: each a file, with a line and a column in it."""


def sealed_modules(task: Task, opened: Places, is_sealed: bool) -> dict[str, Sealed]:
    """Return the test files that judge a task, sealed but for the places `opened`: path -> module."""
    names = [*task.tests.fail_to_pass, *task.tests.pass_to_pass]
    judged = {name.partition("::")[0] for name in names} if names else task.tests.files.keys()
    found: dict[str, Sealed] = {}
    first = 0
    for path in sorted(judged & task.tests.files.keys()):
        if path.endswith(".py") and not is_set_up(path):
            places = frozenset(place for file, place in opened if file == path)
            text = task.tests.files[path]
            module = seal(text, places, with_tables=not names, first=first)
            module = module if is_sealed else Sealed(text, assertions=module.assertions)
            found[path], first = module, first + len(module.checks)
    return found


def _joined(modules: Mapping[str, Sealed]) -> _Answers:
    return _Answers(
        {number: check for one in modules.values() for number, check in one.checks.items()},
        {f"{path}::{test}": needs for path, one in modules.items() for test, needs in one.required.items()},
        {f"{path}::{test}": needs for path, one in modules.items() for test, needs in one.shared.items()},
        {number: (path, at) for path, one in modules.items() for number, at in one.places.items()},
    )


@lru_cache(maxsize=512)
def _bound_names(text: str) -> list[str] | None:
    """Return `bound_names` of a text, sorted; None if only the sandbox's interpreter may know its syntax."""
    try:
        return sorted(bound_names(parse(text)))
    except (SyntaxError, ValueError):
        return None


@cache
def _prelude() -> str:
    texts = sandbox_texts("apart", "always_equal", "hooks", "runner")
    return "\n\n".join([*texts, f"GUARD = load_apart({guard_text()!r})\n"])


def processor_s(task: Task) -> int:
    """Return the seconds of processor time that each process of a task's tests may use."""
    return math.ceil(task.tests.timeout_s)


def longest_s(task: Task) -> int:
    """Return the seconds that all tests may take; twice `processor_s` where they wait for no processor."""
    return 10 * processor_s(task)


class Exam:
    """Run a task's tests on some files, and compare their answers outside the sandbox."""

    def __init__(
        self,
        task: Task,
        patched: dict[str, str],
        modules: Mapping[str, Sealed],
        kept: Collection[str] = (),
        is_base: bool = False,
    ) -> None:
        """Lay out the patched files, but for those that judge: also `kept` ones stay as they were."""
        self.task, self._is_base = task, is_base
        self.answers = _joined(modules)
        self.canaries = f"test_{secrets.token_hex(8)}.py"
        given = {path: text for path, text in task.files.items() if is_set_up(path) or path in kept}
        given |= task.tests.files
        files = {path: text for path, text in patched.items() if not is_set_up(path)}
        self.touched = {path for path, text in files.items() if task.files.get(path) != text} - given.keys()
        files |= given
        files |= {path: module.text for path, module in modules.items()}
        number = secrets.randbelow(1000)
        files[self.canaries] = (
            f"def test_good():\n    assert {number} + 1 == {number + 1}\n\n\n"
            f"def test_bad():\n    assert {number} + 1 == {number + 2}\n"
        )
        self._task_in_sandbox = msgspec.structs.replace(task, files=files)
        self._arguments = [*pytest_command.FEWER_PLUGINS, *pytest_command.own_settings(files), *_OPTIONS]
        own = pytest_command.arguments(task)
        options = own.index("--") if "--" in own else len(own)
        self._arguments += [*own[:options], _NO_TRACEBACKS, *own[options:], self.canaries]

    def run(self, sandboxes: Sandboxes, *options: str) -> tuple[CommandResult, TestReport]:
        """Run the tests; the report of a patch is empty when they did not come to their end.

        Each process may use `processor_s` of processor time, which ends a loop. Twice as much time ends tests
        that wait, but on a busy host not for a processor: a right repair resolves there, too.
        """
        return run_reliably(lambda: self._run(sandboxes, *options), lambda _: False, longest_s(self.task))

    def _run(self, sandboxes: Sandboxes, *options: str) -> tuple[CommandResult, TestReport]:
        report_path, key = f".{secrets.token_hex(16)}", secrets.token_hex(16)
        files = [*self.task.tests.files, self.canaries]
        texts = self._task_in_sandbox.files
        bound = {path: _bound_names(texts[path]) for path in self.task.tests.files if path.endswith(".py")}
        recorder = f"make_recorder(globals().pop('GUARD'), {report_path!r}, {files!r}, {bound!r})"
        program = f"limit_time({processor_s(self.task)})\nRECORDER = {recorder}\n"
        program += f"main({[*options, *self._arguments]!r})\n"
        with sandboxes.open(self._task_in_sandbox) as sandbox:
            began_ns = file_time_ns()
            add_files(sandbox, {f"{report_path}{KEY}": key}, "write the key of a report")
            used_s, waiting_s = 2 * processor_s(self.task), longest_s(self.task)
            result = sandbox.python(program, used_s, waiting_s, prelude=_prelude())
            try:
                report = self._parse(verified_lines(sandbox.read(report_path), key))
            except (OSError, msgspec.MsgspecError, ValueError, RecursionError):  # the patch's code wrote it
                report = TestReport()
            if report.odd:
                require_unchanged(self.task, sandboxes, report.young, began_ns)
        return result, report

    def _parse(self, lines: list[bytes]) -> TestReport:
        """Return an empty report if a patch's end is missing; a later line never undoes a test's failure."""
        entries = [_lines.decode(line) for line in lines]
        report = TestReport(has_end=bool(entries and entries[-1].end))
        if not report.has_end and not self._is_base:  # no policy has changed what the base shows line by line
            return report
        for line in entries:
            if line.answer is not None:
                report.answers.setdefault(line.test, {}).setdefault(int(line.place), []).append(line.answer)
            elif line.outcome:
                self._take_outcome(line, report)
            elif line.young:
                report.young.append(line.young)
            elif line.always_equal:
                report.always_equal[line.always_equal] = line.places.split("\n")
            elif line.odd:
                report.odd.setdefault(line.odd.replace(self.canaries, ""), []).extend(line.places.split("\n"))
        return report

    def _take_outcome(self, line: _Line, report: TestReport) -> None:
        if line.outcome in _OUTCOMES:
            before = report.outcomes.get(line.test, "passed")
            report.outcomes[line.test] = line.outcome if before == "passed" else before
        elif line.outcome == "collected" and not line.test.startswith(f"{self.canaries}::"):
            report.collected.append(line.test)

    def passed(self, report: TestReport) -> set[str]:
        """Return the ids of tests that passed and gave the right answers."""
        good = {
            name
            for name, outcome in report.outcomes.items()
            if outcome == "passed" and self._is_right(name, report.answers.get(name, {}))
        }
        for function, needed in self.answers.shared.items():
            good -= self._incomplete(function, needed, report)
        return good

    def _incomplete(self, function: str, needed: frozenset[int], report: TestReport) -> set[str]:
        """Return the runs of a test with parameters that lack an answer.

        Each run records one for each assertion, all together each row's; but a test may skip a row by itself.
        """
        runs = {name: report.answers.get(name, {}) for name in report.outcomes if head(name) == function}
        skipped = sum(report.outcomes[name] == "skipped" for name in runs)
        missing = needed.difference(*runs.values())
        if len(missing) * len(runs) > len(needed) * skipped:  # more rows than those that are skipped
            return {*runs}
        places = self.answers.places
        sites = {places[number] for number in needed}
        return {name for name, given in runs.items() if not sites <= {places.get(number) for number in given}}

    def _is_right(self, name: str, given: Mapping[int, list[str]]) -> bool:
        checks = self.answers.checks
        return self._required(head(name)) <= given.keys() and all(
            number in checks and checks[number].accepts(text)
            for number, texts in given.items()
            for text in texts
        )

    def _required(self, function: str) -> frozenset[int]:
        """Return the numbers of a test function; an inherited one may stand in another class of its file."""
        required = self.answers.required
        if function in required:
            return required[function]
        path, method = function.partition("::")[0], function.rpartition("::")[2]
        same = [one for one in required if one.startswith(f"{path}::") and one.rpartition("::")[2] == method]
        return required[same[0]] if len(same) == 1 else frozenset()

    def opaque(self, report: TestReport) -> Places:
        """Return the places, each with its file, of values that only their own classes could compare."""
        checks, given = self.answers.checks, (item for one in report.answers.values() for item in one.items())
        return frozenset(
            self.answers.places[number]
            for number, texts in given
            if number in checks and any(map(checks[number].is_opaque, texts))
        )

    def wanted(self, collected: Iterable[str], report: TestReport) -> set[str]:
        """Return the ids of all tests that count, when pytest collected these in the task's own files.

        Where nothing could be collected of a file, for example because its imports fail without a repair,
        those tests of it count that this run found and that its text names.
        """
        found = {name for name in collected if name.partition("::")[0] in self.task.tests.files}
        open_files = self.task.tests.files.keys() - {name.partition("::")[0] for name in found}
        more = {name for name in report.collected if name.partition("::")[0] in open_files}
        heads = set(map(head, more))
        texts = {path: self.task.tests.files[path] for path in open_files if path.endswith(".py")}
        named = {
            name for path, text in texts.items() for name in ids_of_tests(text, path) if name not in heads
        }
        return found | more | named


def head(name: str) -> str:
    """Return a test's id without its parameters."""
    return name.partition("[")[0]


def is_set_up(path: str) -> bool:
    """Return whether a file could change how pytest or the interpreter starts."""
    name = PurePosixPath(path)
    return name.name in SET_UP or name.suffix in {".pth", ".pyc", ".so"}
