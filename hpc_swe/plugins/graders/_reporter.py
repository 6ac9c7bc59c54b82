"""Tells how tests ended, from inside the process that runs them, past everything that is printed.

It is sent into the sandbox as text, with a call of `watch_unittest` or `watch_pytest` at its end, as a
module of a folder that stands first on PYTHONPATH: it is there before any code of the work tree. The first
test run of the command writes its book; tests that start test runs of their own leave it alone. Images bring
their own interpreter, so this is written for Python 3.6. It shares a process with code that nobody trusts:
see `swebench` for what that means.
"""

import json
import os
import shutil
import sys
from typing import Any, Callable  # noqa: UP035

BAD_NUMBER = 2


class Book:
    """The report: one JSON object a line, beginning and end included."""

    def __init__(self, folder: str, good: str, bad: str) -> None:
        self.folder = folder
        self.good = good
        self.bad = bad
        self._file = -1

    def open(self) -> bool:
        """Whether this is the first test run; children of this process then find nothing of it."""
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._file = os.open(self.folder + ".book", flags, 0o600)
        except FileExistsError:
            return False
        shutil.rmtree(self.folder)  # the names of the canaries stand there
        for name in ("PYTHONPATH", "PYTEST_PLUGINS"):
            before = os.environ.pop("HPC_SWE_" + name, "")
            os.environ.pop(name, None)
            if before:
                os.environ[name] = before
        sys.path[:] = [entry for entry in sys.path if entry != self.folder]
        self.note(begin=True)
        return True

    def note(self, **entry: Any) -> None:
        """Nothing is kept in this process: what is written cannot be taken back."""
        os.write(self._file, json.dumps(entry).encode() + b"\n")


def watch_unittest(book: Book) -> None:
    """Record the first run of a `unittest.TextTestRunner`, Django's included."""
    import unittest

    original = unittest.TextTestRunner.run

    def run(self: Any, test: Any) -> Any:
        unittest.TextTestRunner.run = original  # type: ignore[method-assign]
        if not book.open():
            return original(self, test)
        self.resultclass = _recording(self.resultclass, book)
        module = _module(test)
        suite = unittest.TestSuite(
            [_canary(module, book.good, 1), test, _canary(module, book.bad, BAD_NUMBER)]
        )
        result = original(self, suite)
        book.note(end=True)
        return result

    unittest.TextTestRunner.run = run  # type: ignore[method-assign]


def _module(test: Any) -> str:
    while hasattr(test, "__iter__"):
        tests = list(test)
        if not tests:
            return "tests"
        test = tests[0]
    return str(type(test).__module__)


def _canary(module: str, name: str, number: int) -> Any:
    import unittest

    def method(self: Any) -> None:
        self.assertEqual(number, 1)  # noqa: PT009

    return type("Test" + name.title(), (unittest.TestCase,), {"__module__": module, "test_" + name: method})(
        "test_" + name
    )


def _recording(base: Any, book: Book) -> Any:
    def recorder(method: str, outcome: str) -> Callable[..., None]:
        def record(self: Any, test: Any, *rest: Any) -> None:
            book.note(test=test.id(), doc=test.shortDescription() or "", outcome=outcome)
            getattr(base, method)(self, test, *rest)

        return record

    def add_sub_test(self: Any, test: Any, subtest: Any, error: Any) -> None:
        if error is not None:
            book.note(test=test.id(), doc=test.shortDescription() or "", outcome="failed")
        base.addSubTest(self, test, subtest, error)

    methods = {
        "addSuccess": "passed",
        "addFailure": "failed",
        "addError": "error",
        "addSkip": "skipped",
        "addExpectedFailure": "xfailed",
        "addUnexpectedSuccess": "xpassed",
    }
    members: Any = {name: recorder(name, outcome) for name, outcome in methods.items()}
    members["addSubTest"] = add_sub_test
    return type("Recorded", (base,), members)


def watch_pytest(book: Book, config: Any) -> None:
    """Record the first session; called by the hook that pytest finds in this module."""
    import pytest

    last = pytest.hookimpl(trylast=True)
    Listener.pytest_collection_modifyitems = last(Listener.pytest_collection_modifyitems)  # type: ignore[method-assign]
    config.pluginmanager.register(Listener(book))


class Listener:
    """Pytest plugin: every outcome, failures of setup, teardown and collection included."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.writes = False
        self.config: Any = None

    def pytest_sessionstart(self, session: Any) -> None:
        """Only the first session of the command."""
        self.config = session.config
        self.writes = self.book.open()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Canaries in a module that is tested: one before and one after its tests."""
        import pytest

        modules = [item.getparent(pytest.Module) for item in items]
        parent = next((module for module in modules if module is not None), None)
        if not self.writes or parent is None:
            return

        def canary(number: int) -> Callable[[], None]:
            def test() -> None:
                assert number == 1  # noqa: PT015

            return test

        make = getattr(pytest.Function, "from_parent", None)
        for place, name, number in ((0, self.book.good, 1), (len(items) + 1, self.book.bad, BAD_NUMBER)):
            name, function = "test_" + name, canary(number)
            old = pytest.Function
            item = make(parent, name=name, callobj=function) if make else old(name, parent, callobj=function)
            items.insert(place, item)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is an error of that name."""
        if self.writes and report.failed:
            self.book.note(test=self._name(report.nodeid), doc="", outcome="error")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """What is noted last does not undo what was noted before."""
        if not self.writes or (report.when != "call" and report.passed):
            return
        outcome = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        elif report.failed and report.when != "call":
            outcome = "error"
        self.book.note(test=self._name(report.nodeid), doc="", outcome=outcome)

    def pytest_sessionfinish(self) -> None:
        """Without this line nothing counts."""
        if self.writes:
            self.book.note(end=True)

    def _name(self, nodeid: str) -> str:
        relative = getattr(self.config, "cwd_relative_nodeid", str)
        return str(relative(nodeid))
