"""What a grading by swebench is made of: its script, the reporter's book as its log, and its own report.

swebench judges a log. Where its parser reads what unittest or pytest print, the log is not what the tests
printed: it is written here, from the book that `_reporter` kept, in the words that the parser knows. Other
parsers are given what was printed between two marks that nobody can guess beforehand.
"""

import hashlib
import hmac
import importlib.util
import json
import re
import secrets
import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec

from hpc_swe.errors import ConfigError
from hpc_swe.records import Task

_REPORTER = Path(__file__).with_name("_reporter.py")
_UNITTEST = {"parse_log_django"}
_PYTEST = {f"parse_log_{name}" for name in ("pytest", "pytest_options", "pytest_v2", "matplotlib", "seaborn")}
_PYTEST |= {
    f"parse_log_{name}" for name in ("astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff")
}
_PYTEST |= {f"parse_log_{name}" for name in ("xarray", "pydicom", "requests", "pylint", "astropy", "scikit")}
_PYTEST |= {"parse_log_sphinx"}
_IN_UNITTEST = {
    "passed": "ok",
    "failed": "FAIL",
    "error": "ERROR",
    "skipped": "skipped",
    "xfailed": "expected failure",
    "xpassed": "unexpected success",
}
_IN_PYTEST = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR", "xfailed": "XFAIL"}
_SEAL = 16  # characters before each line of the book
_WORST_LAST = ("passed", "xfailed", "skipped", "xpassed", "failed", "error")
START, END, EXIT = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"


class Entry(msgspec.Struct, frozen=True):
    """One line of the reporter's book."""

    test: str = ""
    doc: str = ""
    outcome: Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed"] | None = None
    lax: str = ""
    """``module:class`` of values that equal nearly anything."""
    places: str = ""
    """Where it is from, one a line: files of the work tree, or nothing for what is no file."""
    begin: str = ""
    end: str = ""


_entries = msgspec.json.Decoder(Entry)


@dataclass(frozen=True)
class Believed:
    """What a run of the tests is taken for: swebench's log, or why there is none."""

    log: str = ""
    complaint: str = ""
    is_cheat: bool = False
    lax: dict[str, list[str]] = field(default_factory=dict)
    """Classes whose values equal nearly anything: ``module:class`` -> where each is from."""


@dataclass(frozen=True)
class Run:
    """The files and the shell line of one run of the tests, of which no two are alike."""

    task: Task
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    """Seals the report."""
    also: str = ""
    """Modules to look at when the tests have ended, one a line."""

    @cached_property
    def canaries(self) -> tuple[str, str]:
        """One that must pass and one that must fail, named in words of the task's own tests."""
        known = [*self.task.tests.fail_to_pass, *self.task.tests.pass_to_pass]
        words = re.findall("[a-z]{3,10}", " ".join(known).lower()) + ["other", "empty", "value", "again"]
        good = bad = ""
        while good == bad or any(f"test_{name}" in " ".join(known) for name in (good, bad)):
            good, bad = ("_".join(secrets.choice(words) for _ in range(5)) for _ in range(2))
        return good, bad

    @property
    def kind(self) -> Literal["unittest", "pytest", "log"]:
        """Who tells how the tests ended; decided by the task, never by what came out."""
        parser = self.task.tests.extra["log_parser"]
        return "unittest" if parser in _UNITTEST else "pytest" if parser in _PYTEST else "log"

    @property
    def folder(self) -> str:
        """Where our files lie: no patch can write below .git, and git does not list what is there."""
        return f".git/{self.token}"

    @property
    def book(self) -> str:
        """The reporter's file."""
        return f"{self.folder}.book"

    @property
    def touched(self) -> str:
        """What git says that the submission changes."""
        return f"{self.folder}.touched"

    @property
    def log(self) -> str:
        """All that was printed."""
        return f"{self.folder}.log"

    def files(self) -> dict[str, str]:
        """Path -> text, to be written before the command."""
        script = {f"{self.folder}/eval.sh": self._script()}
        if self.kind == "log":
            return script
        return script | {f"{self.folder}/sitecustomize.py": self._reporter()}

    def command(self) -> str:
        """The shell line, for the work directory."""
        return f"bash {self.folder}/eval.sh > {self.log} 2>&1"

    def believe(self, book: bytes, log: str) -> Believed:
        """What the two files amount to."""
        return self._from_log(log) if self.kind == "log" else self._from_book(book)

    def _script(self) -> str:
        """The task's own script, with the reporter set up right before the tests."""
        lines = self.task.tests.command.split("\n")
        starts = [number for number, line in enumerate(lines) if START in line]
        ends = [number for number, line in enumerate(lines) if END in line]
        if len(starts) != 1 or len(ends) != 1 or starts[0] > ends[0]:
            raise ConfigError(
                f"task {self.task.task_id}: its eval script must hold {START!r} and {END!r}, each once"
            )
        start, end = starts[0], ends[0]
        return "\n".join(
            [
                *lines[:start],
                *self._exports(),
                f"echo {self._mark(START)}",
                *lines[start + 1 : end],
                f"t{self.token}=$?",
                f"printf '\\n{self._mark(END)} %s\\n' $t{self.token}",
                *lines[end + 1 :],
            ]
        )

    def _mark(self, what: str) -> str:
        return f"{self.token}-{'start' if what == START else 'end'}"

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
        secret = ", ".join(repr(text) for text in (self.kind, self.also, self.key, *self.canaries))
        return f"{_REPORTER.read_text()}\n\nwatch(os.path.dirname(os.path.abspath(__file__)), {secret})\n"

    def _from_log(self, log: str) -> Believed:
        pattern = rf"^{self._mark(START)}\n(.*)^{self._mark(END)} (\d+)$"
        found = re.search(pattern, log, re.DOTALL | re.MULTILINE)
        if found is None:
            return Believed(complaint="the tests did not come to their end")
        printed = found[1].replace(">>>>>", "")
        return Believed(f"{START}\n{printed}\n{END}\n{EXIT}: {found[2]}\n")

    def _from_book(self, book: bytes) -> Believed:
        entries = self._unsealed(book)
        if entries is None:
            return Believed(complaint="the report is not the reporter's")
        if len(entries) < 2 or not entries[0].begin or not entries[-1].end:
            return Believed(complaint="the tests did not come to their end")
        outcomes, docs = _merged(entries)
        good, bad = (_take(outcomes, name) for name in self.canaries)
        if (good, bad) != ("passed", "failed"):
            why = f"a canary died (good {good}, bad {bad}): the submission changes how tests end"
            return Believed(complaint=why, is_cheat=good == "failed" or bad == "passed")
        lines = _unittest_lines(outcomes, docs) if self.kind == "unittest" else _pytest_lines(outcomes)
        lax = {entry.lax: entry.places.split("\n") for entry in entries if entry.lax}
        return Believed("\n".join([START, *lines, END, ""]), lax=lax)

    def _unsealed(self, book: bytes) -> list[Entry] | None:
        """The lines of the book; None when one is not the reporter's, or not in its place."""
        entries, seal = [], b""
        for line in book.splitlines():
            sealed = seal + line[_SEAL:]
            seal = hashlib.blake2b(sealed, key=self.key.encode(), digest_size=_SEAL // 2).hexdigest().encode()
            if not hmac.compare_digest(seal, line[:_SEAL]):
                return None
            try:
                entries.append(_entries.decode(line[_SEAL:]))
            except msgspec.MsgspecError:  # no test has such a name
                return None
        return entries


def report(task: Task, submission: str, log: str) -> dict[str, Any]:
    """swebench's own verdict on a log."""
    grading, types = official("harness.grading"), official("types")
    extra = task.tests.extra
    spec = types.TestSpec(
        instance_id=task.task_id,
        image=task.image,
        eval_script_list=task.tests.command.split("\n"),
        repo=extra["repo"],
        version=extra["version"],
        FAIL_TO_PASS=task.tests.fail_to_pass,
        PASS_TO_PASS=task.tests.pass_to_pass,
        log_parser=extra["log_parser"],
        eval_type=extra["eval_type"],
    )
    prediction = {"instance_id": task.task_id, "model_patch": submission, "model_name_or_path": "policy"}
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="replace") as file:
        file.write(log)
        file.flush()
        verdict: dict[str, Any] = grading.get_eval_report(spec, prediction, file.name, True)[task.task_id]
    return verdict


def official(name: str) -> ModuleType:
    """A module of swebench, without its harness package, which imports the clients of Docker and Modal."""
    found = importlib.util.find_spec("swebench")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("[grader] swebench is not installed: pip install --no-deps swebench unidiff")
    package = "swebench.harness"
    if package not in sys.modules:
        bare = ModuleType(package)
        bare.__path__ = [str(Path(found.submodule_search_locations[0], "harness"))]
        sys.modules[package] = bare
    return importlib.import_module(f"swebench.{name}")


def excluded(task: Task, set_up: list[str]) -> str:
    """Options of ``git apply`` that leave out what is not the submission's to change."""
    allowed = [path for path in task.tests.extra.get("set_up", "").split("\n") if path]
    tests = json.loads(task.tests.extra["test_files"])
    options = [f"--exclude={_literally(path)}" for path in tests]
    options += [f"--include={_literally(path)}" for path in allowed]
    options += [f"--exclude={prefix}{name}" for name in set_up for prefix in ("", "*/")]
    return " ".join(shlex.quote(option) for option in [*options, "--include=*"])


def _literally(path: str) -> str:
    return re.sub(r"([*?\[\]\\])", r"\\\1", path)


def _merged(entries: list[Entry]) -> tuple[dict[str, str], dict[str, str]]:
    """Test -> its worst outcome, and test -> the first line of its docstring."""
    outcomes: dict[str, str] = {}
    docs = {}
    for entry in entries:
        if entry.outcome is not None:
            outcomes[entry.test] = max(
                entry.outcome, outcomes.get(entry.test, "passed"), key=_WORST_LAST.index
            )
            docs[entry.test] = entry.doc
    return outcomes, docs


def _take(outcomes: dict[str, str], canary: str) -> str:
    names = [name for name in outcomes if name.endswith(f"test_{canary}")]
    return outcomes.pop(names[0]) if len(names) == 1 else "absent"


def _unittest_lines(outcomes: dict[str, str], docs: dict[str, str]) -> list[str]:
    """Under every name that some version of Python or some list has for the test."""
    lines = []
    for test, outcome in outcomes.items():
        owner, _, method = test.rpartition(".")
        names = [f"{method} ({owner})", f"{method} ({test})", docs[test].strip(), test]
        lines += [f"{name} ... {_IN_UNITTEST[outcome]}" for name in names if _is_line(name)]
    return lines


def _pytest_lines(outcomes: dict[str, str]) -> list[str]:
    told = [(test, _IN_PYTEST.get(outcome)) for test, outcome in outcomes.items()]
    return [f"{word} {test}" for test, word in told if word and _is_line(test)]


def _is_line(name: str) -> bool:
    return bool(name) and len(name.splitlines()) == 1
