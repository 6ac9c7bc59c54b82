"""The program that runs tests in a sandbox and writes down how they ended, and what they computed.

It is sent there as text, after those of `_guard` and `_report`, with a call of `main` at its end. It shares
a process with code that nobody trusts, so little of what it says is proof by itself; see `_sealed`.
"""

import os
import sys
from collections.abc import Iterable
from typing import Any

from hpc_swe.plugins.graders._guard import Guard
from hpc_swe.plugins.graders._report import book, hidden  # in a sandbox these texts stand above


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
    """Pytest plugin: the outcome of every test, failures of its setup and teardown included.

    What it notes leaves this process at once, sealed; only reports that pytest itself makes are noted.
    """

    def __init__(self, tell: Any, files: frozenset[str]) -> None:
        self._tell, self._files = tell, files

    def pytest_sessionstart(self) -> None:
        """Only now that pytest is complete may modules of the work directory be found."""
        self._tell("learn")
        self._tell("hold_class", Recorder)
        self._tell("hold_values", vars(self))
        sys.path.insert(0, os.getcwd())  # noqa: PTH109

    def pytest_collection_modifyitems(self, items: Any) -> None:
        """Tests are those of their files."""
        for item in items:
            self._look(item)

    def pytest_runtest_makereport(self, item: Any) -> None:
        """They still are."""
        self._look(item)

    def _look(self, item: Any) -> None:
        if item.nodeid.partition("::")[0] in self._files:
            name = getattr(item, "originalname", None) or item.name.partition("[")[0]
            self._tell("look_at_test", item.nodeid, name, getattr(item, "obj", None))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Whose answers come next."""
        self._tell("begin", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test passed when its call passed and nothing around it failed; what it replaced is back then."""
        if report.when == "teardown":
            self._tell("check")
        if report.when == "call" or not report.passed:
            self._tell("report", report.nodeid, report.outcome)

    def answer(self, place: int, value: object) -> None:
        """Stands in a test where it compared `value` with a literal."""
        self._tell("answer", place, canonical(value))


def main(result: str, key: str, files: list[str], arguments: list[str]) -> None:
    """Run pytest on the tests of these files; the report has no end unless it comes to its own."""
    import pytest

    global RECORDER  # noqa: PLW0603 - tests find it there
    sys.dont_write_bytecode = True
    note, mine = book(result, key), sys._getframe()  # noqa: SLF001
    root, own = os.getcwd(), main.__code__.co_filename  # noqa: PTH109
    guard = Guard(lambda what, places: note(odd=what, places=places), root, own, files)
    RECORDER = Recorder(hidden(guard, _deeds(note, guard, mine)), frozenset(files))
    pytest.main(arguments, plugins=[RECORDER])
    RECORDER._tell("end")  # noqa: SLF001
    sys.stdout.flush()
    os._exit(0)  # no code of the submission runs from here on


def _deeds(note: Any, guard: Any, mine: Any) -> dict[str, Any]:
    """What the recorder does, out of reach of those who find it."""
    now, frame = [""], sys._getframe  # noqa: SLF001

    def begin(test: str) -> None:
        guard.require_judges(mine)
        now[0] = test

    def report(test: str, outcome: str) -> None:
        guard.require_judges(mine)
        note(test=test, outcome=outcome)

    def answer(number: int, value: str) -> None:
        note(test=now[0], place=number, answer=value)

    def end() -> None:
        if frame(2) is not mine and frame(3) is not mine:
            guard.odd("somebody else ends")
        note(end=True)

    return {"begin": begin, "report": report, "answer": answer, "end": end}


RECORDER: Any = None
