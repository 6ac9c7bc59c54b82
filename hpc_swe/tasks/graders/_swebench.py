"""Prepare one run of a task's tests for swebench, and make the log that swebench judges.

Where swebench's parser reads the output of unittest or pytest, the log does not hold what the tests printed:
it is written here, from the report that `reporter` made, in the words that the parser knows. Other parsers
get the output between two marks that nobody can guess beforehand.
"""

import json
import logging
import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal

import msgspec

from hpc_swe.base.records import Task
from hpc_swe.tasks.graders._inside.report import KEY, verified_lines
from hpc_swe.tasks.graders._inside.texts import guard_text, sandbox_texts
from hpc_swe.tasks.swebench_rows import END, START, TESTS, find_marks

log = logging.getLogger(__name__)

_CANARIES = 6
CaseOutcome = Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed"]
_BY_PYTEST = "pytest pytest_options pytest_v2 matplotlib seaborn astroid flask marshmallow pvlib pyvista"
_BY_PYTEST += " sqlfluff xarray pydicom requests pylint astropy scikit sphinx"
_PYTEST = {f"parse_log_{name}" for name in _BY_PYTEST.split()}
_BAD = ["ERROR {}", "FAILED {}"]  # each parser of pytest's output knows one of them
_LINES: dict[CaseOutcome, tuple[str, list[str]]] = {
    "passed": ("{} ... ok", ["PASSED {}"]),
    "xfailed": ("{} ... expected failure", ["XFAIL {}"]),
    "skipped": ("{} ... skipped", ["SKIPPED {}"]),
    "xpassed": ("{} ... FAIL", _BAD),
    "failed": ("{} ... FAIL", _BAD),
    "error": ("{} ... ERROR", _BAD),
}
"""Outcome -> the line of unittest and the lines of pytest for it."""
_WORST_LAST = tuple(_LINES)
_STATUSES: dict[CaseOutcome, str] = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR"}
"""Outcome -> the word for it in a task's statuses, which leave out other outcomes."""


class ReportLine(msgspec.Struct, frozen=True):
    """A line of the report is a test's outcome, an oddity, a hidden canary, the beginning or the end."""

    test: str = ""
    doc: str = ""
    outcome: str = ""
    """A `CaseOutcome`, or what a plugin calls a run that it repeats, which is no outcome."""
    always_equal: str = ""
    """``module:class`` of values that equal nearly anything."""
    odd: str = ""
    """Sign that code under test changes the code that runs or judges the tests."""
    young: str = ""
    """A file that is not believed, because it was made or changed since the guard began."""
    canary: str = ""
    """A test that must fail, inserted next to one of the task's own."""
    owner: str = ""
    """First part of the names of the tests in the canary's class or file."""
    places: str = ""
    """Files of the work tree that the finding comes from, one a line; an empty line is no file."""
    begin: str = ""
    end: str = ""


_entries = msgspec.json.Decoder(ReportLine)


@dataclass(frozen=True)
class ParsedRun:
    """A parsed run has swebench's log, or the complaint that says why there is none."""

    log: str = ""
    complaint: str = ""
    is_cheat: bool = False
    always_equal: dict[str, list[str]] = field(default_factory=dict)
    """Classes whose values equal nearly anything: ``module:class`` -> the files that it comes from."""
    odd: dict[str, list[str]] = field(default_factory=dict)
    """Signs that code under test changes how it is judged -> the files that they come from."""
    young: list[str] = field(default_factory=list)
    """Files that were too young to be believed; a sign may come from this."""
    outcomes: dict[str, CaseOutcome] = field(default_factory=dict)
    """Test -> its worst outcome, where the reporter runs."""
    docs: dict[str, str] = field(default_factory=dict)
    """Test -> the first line of its docstring."""


@dataclass(frozen=True)
class Run:
    """A run has its own random names and key, and makes the files and the shell line that run the tests."""

    task: Task
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    """Key that seals the report."""
    modules: str = ""
    """Modules whose classes are examined when the tests have ended, one a line."""

    @cached_property
    def canaries(self) -> tuple[str, ...]:
        """Name one canary test that must pass and others that must fail, in words of the task's own tests."""
        known = [*self.task.tests.fail_to_pass, *self.task.tests.pass_to_pass]
        words = re.findall("[a-z]{3,10}", " ".join(known).lower()) + ["other", "empty", "value", "again"]
        found: set[str] = set()
        while len(found) < _CANARIES:
            name = "_".join(secrets.choice(words) for _ in range(5))
            if f"test_{name}" not in " ".join(known) and not any(name.endswith(other) for other in found):
                found.add(name)
        return tuple(found)

    @property
    def kind(self) -> Literal["unittest", "pytest", "log"]:
        """Source of outcomes; it depends on the task's parser and never on what was printed."""
        parser = self.task.tests.extra["log_parser"]
        return "unittest" if parser == "parse_log_django" else "pytest" if parser in _PYTEST else "log"

    @property
    def folder(self) -> str:
        """Folder of the grader's files: no patch can write below .git, and git does not list its contents."""
        return f".git/{self.token}"

    def files(self) -> dict[str, str]:
        """Return the files that must be written before the command: path -> text."""
        script = {f"{self.folder}/eval.sh": self._script()}
        if self.kind == "log":
            return script
        files = {f"{self.folder}/sitecustomize.py": self._reporter(), f"{self.folder}.report{KEY}": self.key}
        return script | files

    def parse(self, report: bytes, log: str) -> ParsedRun:
        """Parse the run's report, or its log where no reporter runs."""
        return self._from_log(log) if self.kind == "log" else self._from_report(report)

    def _script(self) -> str:
        lines = _without_patch(self.task)
        start, end = find_marks(self.task.task_id, lines)
        return "\n".join(
            [
                *lines[:start],
                'rm -f "${0%/*}".{tests,patch,touched,support} "$0"',  # no test may read them
                *self._exports(),
                f"echo {self.token}-start",
                *lines[start + 1 : end],
                f"t{self.token}=$?",
                f"printf '\\n{self.token}-end %s\\n' $t{self.token}",
                *lines[end + 1 :],
            ]
        )

    def _exports(self) -> list[str]:
        if self.kind == "log":
            return []
        exports = [
            'export HPC_SWE_PYTHONPATH="${PYTHONPATH:-}" HPC_SWE_PYTEST_PLUGINS="${PYTEST_PLUGINS:-}"',
            f'export PYTHONPATH="$PWD/{self.folder}${{PYTHONPATH:+:$PYTHONPATH}}"',
        ]
        if self.kind == "pytest":
            exports.append(f'export PYTEST_PLUGINS="m{self.token}${{PYTEST_PLUGINS:+,$PYTEST_PLUGINS}}"')
        return exports

    def _reporter(self) -> str:
        files = json.loads(self.task.tests.extra["test_files"])
        arguments = ", ".join(map(repr, (self.kind, self.modules, files, *self.canaries)))
        texts = sandbox_texts("apart", "always_equal", "hooks", "reporter")
        guard = f"load_apart({guard_text()!r})"
        call = f"watch({guard}, os.path.dirname(os.path.abspath(__file__)), {arguments})\n"
        return "\n\n".join([*texts, call])

    def _from_log(self, log: str) -> ParsedRun:
        # A regular expression would take minutes over many marks, and no thread would run meanwhile.
        # Nor is there a list of lines, which may take eighty times the memory of the log.
        text, start, end = f"\n{log}\n", f"\n{self.token}-start\n", f"\n{self.token}-end "
        last = text.rfind(end)
        while last >= 0 and not (code := text[last + len(end) : text.index("\n", last + 1)]).isdecimal():
            last = text.rfind(end, 0, last)
        first = text.find(start, 0, last + 1)
        if last < 0 or first < 0:
            return ParsedRun(complaint="the tests did not come to their end")
        printed = text[first + len(start) : last + 1].replace(">>>>>", "")
        return ParsedRun(f"{START}\n{printed}\n{END}\n>>>>> Test Exit Code: {code}\n")

    def _from_report(self, report: bytes) -> ParsedRun:
        try:
            entries = [_entries.decode(line) for line in verified_lines(report, self.key)]
        except (msgspec.MsgspecError, ValueError, RecursionError):  # no test has such a name
            return ParsedRun(complaint="the report is not the reporter's")
        if len(entries) < 2 or not entries[0].begin or not entries[-1].end:
            return ParsedRun(complaint="the tests did not come to their end")
        always_equal = {one.always_equal: one.places.split("\n") for one in entries if one.always_equal}
        odd: dict[str, list[str]] = {}
        for one in entries:
            if one.odd:
                odd.setdefault(one.odd, []).extend(one.places.split("\n"))
        young = [one.young for one in entries if one.young]
        outcomes, docs = _merge(entries)
        good, bad, *hidden = (_take(outcomes, name) for name in self.canaries)
        owners = {entry.canary: entry.owner for entry in entries if entry.canary}
        missing = [
            name
            for name, outcome in zip(self.canaries[2:], hidden, strict=True)
            if outcome == "absent" and name in owners
            if any(ended == "passed" and test.startswith(owners[name]) for test, ended in outcomes.items())
        ]
        if (good, bad) != ("passed", "failed") or {"passed", "xpassed"} & {*hidden} or missing:
            ends = f"good {good}, bad {bad} {hidden}"
            why = f"a canary test ended wrongly ({ends}): the patch changes how tests end"
            is_cheat = good == "failed" or bool({"passed", "xpassed"} & {bad, *hidden})
            # A base commit whose tests cannot be imported shows all the same what the environment does.
            return ParsedRun(complaint=why, is_cheat=is_cheat, odd=odd, young=young)
        if "statuses" in self.task.tests.extra:
            outcomes, docs = _without_files(outcomes)
        return ParsedRun(always_equal=always_equal, odd=odd, young=young, outcomes=outcomes, docs=docs)

    def log_of(self, parsed: ParsedRun, base: ParsedRun) -> str:
        """Write swebench's log of the wanted tests, the worst outcome last, since a name's last line counts.

        A test that was skipped or failed as expected keeps that outcome only if it must pass both before and
        after, and ended likewise at the base commit. Otherwise the patch itself could have caused it, and the
        test counts as failed.
        """
        if self.kind == "log":
            return parsed.log
        tests, lines = self.task.tests, []
        wanted = {*tests.fail_to_pass, *tests.pass_to_pass}
        for test, outcome in sorted(parsed.outcomes.items(), key=lambda item: _WORST_LAST.index(item[1])):
            names = _names(self.kind, test, parsed.docs[test], wanted)
            excused = base.outcomes.get(test) == outcome and not names & {*tests.fail_to_pass}
            counted = outcome if excused or outcome not in ("skipped", "xfailed") else "failed"
            in_unittest, in_pytest = _LINES[counted]
            templates = [in_unittest] if self.kind == "unittest" else in_pytest
            lines += [template.format(name) for name in sorted(names) for template in templates]
        return "\n".join([START, *lines, END, ""])

    def ended(self, parsed: ParsedRun) -> frozenset[str]:
        """Return the wanted tests that have any outcome; without a reporter all count as ended."""
        wanted = {*self.task.tests.fail_to_pass, *self.task.tests.pass_to_pass}
        if self.kind == "pytest":
            heads = {_head(test) for test in parsed.outcomes}
            return frozenset(name for name in wanted if _head(name) in heads)
        if self.kind == "unittest":
            docs = parsed.docs
            return frozenset().union(*(_names("unittest", test, docs[test], wanted) for test in docs))
        return frozenset(wanted)

    def needs_base(self, parsed: ParsedRun) -> bool:
        """Return whether the outcomes at the base commit matter for the log."""
        wanted = {*self.task.tests.pass_to_pass}
        return any(
            outcome in ("skipped", "xfailed") and _names(self.kind, test, parsed.docs[test], wanted)
            for test, outcome in parsed.outcomes.items()
        )


def _without_patch(task: Task) -> list[str]:
    """Return the lines of the task's script, which reads the test patch from a file instead of holding it.

    The shell that runs a script keeps it open, so what the script holds can be read as long as tests run.
    """
    lines = task.tests.command.split("\n")
    patch = task.tests.extra["test_patch"].strip("\n")
    for number, line in enumerate(lines):
        given = re.fullmatch(r"(.*[^<])<<\s*(['\"]?)(\w+)\2\s*", line)
        end = lines.index(given[3], number) if given and given[3] in lines[number:] else 0
        if given and end and "\n".join(lines[number + 1 : end]).strip("\n") == patch:
            return [*lines[:number], f'{given[1]}< "${{0%/*}}.tests"', *lines[end + 1 :]]
    _warn_of_readable_tests(task.task_id)
    return lines


@cache
def _warn_of_readable_tests(task_id: str) -> None:
    log.warning(
        "readable: no here-document in the eval_script of row %s is its test_patch, so tests can read what "
        "the script holds of it; write it as: git apply -v - <<'EOF', the lines of the patch, EOF",
        task_id,
    )


def differing(task: Task, parsed: ParsedRun) -> str:
    """Return the first test whose status is not what the task says of every test; empty when it says none."""
    if "statuses" not in task.tests.extra:
        return ""
    wanted = json.loads(task.tests.extra["statuses"])
    found = {test: _STATUSES[end] for test, end in parsed.outcomes.items() if end in _STATUSES}
    for test in sorted({*wanted, *found}):
        if wanted.get(test) != found.get(test):
            return (
                f"{test}: {found.get(test, 'not run')}, and with the reference {wanted.get(test, 'not run')}"
            )
    return ""


def solved_files(task: Task) -> list[str]:
    """Return the files that the reference changes."""
    return [path for path in task.tests.extra.get("set_up", "").split("\n") if path]


def test_paths(task: Task) -> list[str]:
    """Return the patterns of the paths that are tests."""
    patterns = task.tests.extra.get("test_paths")
    return patterns.split("\n") if patterns else [*TESTS]


def apply_options(task: Task, set_up: list[str], support: Sequence[str] = ()) -> str:
    """Return options of ``git apply`` that leave out the files that a patch must not change.

    `support` are modules that only tests import. A package of such a name would replace the module.
    """
    options = [f"--exclude={_escape(path)}" for path in json.loads(task.tests.extra["test_files"])]
    options += [f"--include={_escape(path)}" for path in solved_files(task)]
    options += [f"--exclude={prefix}{name}" for name in set_up for prefix in ("", "*/")]
    options += [f"--exclude={pattern}" for pattern in test_paths(task)]
    for path in map(_escape, support):
        options += [f"--exclude={path}", f"--exclude={path.removesuffix('.py')}/*"]
    return " ".join(shlex.quote(option) for option in [*options, "--include=*"])


def _escape(path: str) -> str:
    return re.sub(r"([*?\[\]\\])", r"\\\1", path)


def _merge(entries: list[ReportLine]) -> tuple[dict[str, CaseOutcome], dict[str, str]]:
    outcomes: dict[str, CaseOutcome] = {}
    docs = {}
    for entry in entries:
        for outcome in _WORST_LAST:
            if entry.outcome != outcome:
                continue
            before = outcomes.get(entry.test, "passed")
            outcomes[entry.test] = max((outcome, before), key=_WORST_LAST.index)
            docs[entry.test] = entry.doc
    return outcomes, docs


def _without_files(outcomes: dict[str, CaseOutcome]) -> tuple[dict[str, CaseOutcome], dict[str, str]]:
    """Return each worst outcome by the name that a test has without its file, and empty docstrings."""
    ordered = sorted(outcomes.items(), key=lambda item: _WORST_LAST.index(item[1]))
    named = {test.partition("::")[2].replace("::", "."): outcome for test, outcome in ordered}
    return named, dict.fromkeys(named, "")


def _take(outcomes: dict[str, CaseOutcome], canary: str) -> str:
    names = [name for name in outcomes if name.endswith(f"test_{canary}")]
    return outcomes.pop(names[0]) if len(names) == 1 else "absent"


def _names(kind: str, test: str, doc: str, wanted: set[str]) -> set[str]:
    """Return the names that any Python version, list of tests or parser may use for a test, if wanted."""
    if kind == "pytest":  # swebench's parsers cut names at blanks and shorten parameters, but keep the head
        is_line = len(test.splitlines()) == 1
        return {test} if is_line and _head(test) in {_head(name) for name in wanted} else set()
    owner, _, method = test.rpartition(".")
    return wanted & {f"{method} ({owner})", f"{method} ({test})", doc.strip(), test} - {""}


def by_name_in_logs(parsed: ParsedRun) -> dict[str, str]:
    """Return each test's worst outcome, by its name as swebench's parser of pytest cuts it at a blank."""
    ordered = sorted(parsed.outcomes.items(), key=lambda item: _WORST_LAST.index(item[1]))
    return {test.partition(" ")[0]: outcome for test, outcome in ordered}


def _head(name: str) -> str:
    """Return the part of a name that no parser of pytest cuts."""
    return re.split(r"[\[\s]", name, maxsplit=1)[0]
