"""The program that runs tests in a sandbox and writes down how they ended, and what they computed.

It is sent there as text, after that of `_guard` and with a call of `main` at its end. It shares a process
with code that nobody trusts, so nothing it says is proof by itself; see `_sealed`.
"""

import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from hpc_swe.plugins.graders._guard import Guard  # in a sandbox its text stands above


def canonical(value: Any) -> str:  # noqa: C901, PLR0911  (one line for each kind of literal)
    """A text that is the same for two plain values exactly when they are equal.

    Only the methods of the built-in types are asked: what a subclass says of itself does not count.
    """
    if value is None:
        return "None"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        plain = float.__add__(value, 0.0)
        return int.__repr__(int(plain)) if plain.is_integer() else float.__repr__(plain)
    if isinstance(value, str):
        return str.__repr__(value)
    if isinstance(value, bytes):
        return bytes.__repr__(value)
    if isinstance(value, list):
        return _joined("[", map(canonical, list.__iter__(value)))
    if isinstance(value, tuple):
        return _joined("(", map(canonical, tuple.__iter__(value)))
    if isinstance(value, set | frozenset):
        members = set.__iter__(value) if isinstance(value, set) else frozenset.__iter__(value)
        return _joined("{", sorted(map(canonical, members)))
    if isinstance(value, dict):
        return _joined("{:", sorted(f"{canonical(k)}:{canonical(v)}" for k, v in dict.items(value)))
    if type(value).__module__ == "numpy":
        return canonical(value.tolist())
    raise AssertionError(f"{type(value).__name__} is no plain value")


def _joined(kind: str, parts: Iterable[str]) -> str:
    return kind + ",".join(parts) + kind


class Recorder:
    """Pytest plugin: the outcome of every test, failures of its setup and teardown included."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.answers: dict[str, dict[int, str]] = {}
        self.odd: list[str] = []
        self.test = ""
        self.guard: Any = None

    def pytest_sessionstart(self) -> None:
        """Only now that pytest is complete may modules of the work directory be found."""
        self.guard.learn()
        sys.path.insert(0, os.getcwd())  # noqa: PTH109

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Whose answers come next."""
        self.test = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test passed when its call passed and nothing around it failed; what it replaced is back then."""
        if report.when == "teardown":
            self.guard.check()
        if report.when == "call" or not report.passed:
            known = self.outcomes.get(report.nodeid, "passed")
            self.outcomes[report.nodeid] = report.outcome if known == "passed" else known

    def note(self, what: str, _: str) -> None:
        """Something that judges was changed by the code that it judges."""
        self.odd.append(what)

    def answer(self, place: int, value: object) -> None:
        """Stands in a test where it compared `value` with a literal."""
        self.answers.setdefault(self.test, {})[place] = canonical(value)


def main(result: str, arguments: list[str]) -> None:
    """Run pytest; nothing is written unless it comes to its end."""
    import pytest

    sys.dont_write_bytecode = True
    file = os.open(result, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    RECORDER.guard = Guard(RECORDER.note, os.getcwd(), Guard.odd.__code__.co_filename)  # noqa: PTH109
    pytest.main(arguments, plugins=[RECORDER])
    told = {"outcomes": RECORDER.outcomes, "answers": RECORDER.answers, "odd": RECORDER.odd}
    os.write(file, json.dumps(told).encode())
    sys.stdout.flush()
    os._exit(0)  # no code of the submission runs from here on


RECORDER = Recorder()
