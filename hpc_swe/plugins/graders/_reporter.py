"""Tells how tests ended, from inside the process that runs them, past everything that is printed.

It is sent into the sandbox as text, with a call of `watch` at its end, as the ``sitecustomize`` of a folder
that stands first on PYTHONPATH: in the first Python process of the command it is there before any code of
the work tree, takes its secrets into memory, and leaves nothing on disk that tells them. The first test run
of that process is reported; test runs that tests start are left alone. Images bring their own interpreter,
so this is written for Python 3.6. It shares a process with code that nobody trusts, and so looks up nothing
later on that such code can replace by name; see `swebench` for what remains.
"""

import gc
import hashlib
import json
import os
import shutil
import sys
import types
from typing import Any, Callable  # noqa: UP035

BAD_NUMBER = 2


class Book:
    """The report: one JSON object a line, beginning and end included, each sealed with all before it."""

    def __init__(self, folder: str, key: str, good: str, bad: str) -> None:
        self.good = good
        self.bad = bad
        self._key = key.encode()
        self._seal = ""
        self._process = os.getpid()
        self._pid, self._write, self._digest = os.getpid, os.write, hashlib.blake2b
        self._quote = json.encoder.encode_basestring_ascii
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = os.open(folder + ".book", flags, 0o600)
        self.note(begin=True)

    def note(self, **entry: Any) -> None:
        """Nothing is kept in this process: what is written cannot be taken back."""
        if self._pid() != self._process:  # the tests forked
            return
        told = [self._quote(name) + ":" + self._quote(str(value)) for name, value in entry.items()]
        line = "{" + ",".join(told) + "}"
        sealed = (self._seal + line).encode()
        self._seal = self._digest(sealed, key=self._key, digest_size=8).hexdigest()
        self._write(self._file, (self._seal + line + "\n").encode())

    def close(self) -> None:
        """The last word; without it nothing counts."""
        for file in lax_files(os.getcwd()):  # noqa: PTH109
            self.note(lax=file)
        self.note(end=True)


def watch(folder: str, kind: str, *secrets: str) -> None:
    """Report what this process tests, if it is the first; its children find nothing of this."""
    try:
        book = Book(folder, *secrets)
    except FileExistsError:
        return
    shutil.rmtree(folder)
    sys.modules["sitecustomize"] = types.ModuleType("sitecustomize")
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    _give_back("PYTHONPATH")
    (watch_unittest if kind == "unittest" else watch_pytest)(book)


def _give_back(name: str) -> None:
    before = os.environ.pop("HPC_SWE_" + name, "")
    os.environ.pop(name, None)
    if before:
        os.environ[name] = before


def lax_files(root: str) -> Any:
    """Files below a folder that make values which equal everything, and with which any test would pass."""
    found = set()
    # Not isinstance: it would ask proxies what they stand for, and so make them.
    for kind in [thing for thing in gc.get_objects() if issubclass(type(thing), type)]:
        equals = vars(kind).get("__eq__")
        file = getattr(getattr(equals, "__code__", None), "co_filename", "")
        if not file.startswith(root + "/"):
            continue
        builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        try:
            if equals(builtin.__new__(kind), object()) is True:
                found.add(file[len(root) + 1 :])
        except Exception:  # noqa: BLE001, S112  (it looked at the value, as it should)
            continue
    return sorted(found)


def watch_unittest(book: Book) -> None:
    """Record the first run of a `unittest.TextTestRunner`, Django's included."""
    import unittest

    original = unittest.TextTestRunner.run

    def run(self: Any, test: Any) -> Any:
        unittest.TextTestRunner.run = original  # type: ignore[method-assign]
        self.resultclass = _recording(self.resultclass, book)
        like = _first(test)
        suite = unittest.TestSuite([_canary(like, book.good, 1), test, _canary(like, book.bad, BAD_NUMBER)])
        result = original(self, suite)
        book.close()
        return result

    unittest.TextTestRunner.run = run  # type: ignore[method-assign]


def _first(test: Any) -> Any:
    while hasattr(test, "__iter__"):
        tests = list(test)
        if not tests:
            break
        test = tests[0]
    return type(test)


def _canary(like: Any, name: str, number: int) -> Any:
    """A test that nobody can tell by its name from those of a class."""
    import unittest

    def method(self: Any) -> None:
        self.assertEqual(number, 1)  # noqa: PT009

    names = {"__module__": like.__module__, "__qualname__": like.__qualname__, "test_" + name: method}
    return type(like.__name__, (unittest.TestCase,), names)("test_" + name)


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


def watch_pytest(book: Book) -> None:
    """Record the first session, as the plugin that PYTEST_PLUGINS names."""
    name = os.environ.get("PYTEST_PLUGINS", "").partition(",")[0]
    plugin: Any = types.ModuleType(name, "PYTEST_DONT_REWRITE")

    def configure(config: Any) -> None:
        import pytest

        last = pytest.hookimpl(trylast=True)
        Listener.pytest_collection_modifyitems = last(Listener.pytest_collection_modifyitems)  # type: ignore[method-assign]
        config.pluginmanager.register(Listener(book, config))

    plugin.pytest_addoption = lambda parser: _give_back("PYTEST_PLUGINS")  # it is called before any conftest
    plugin.pytest_configure = configure
    sys.modules[name] = plugin


class Listener:
    """Pytest plugin: every outcome, failures of setup, teardown and collection included."""

    def __init__(self, book: Book, config: Any) -> None:
        self.book = book
        self.config = config

    def pytest_collection_modifyitems(self, items: Any) -> None:
        """Canaries in a module that is tested: one before and one after its tests."""
        import pytest

        modules = [item.getparent(pytest.Module) for item in items]
        parent = next((module for module in modules if module is not None), None)
        if parent is None:
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
        if report.failed:
            self.book.note(test=self._name(report.nodeid), doc="", outcome="error")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """What is noted last does not undo what was noted before."""
        if report.when != "call" and report.passed:
            return
        outcome = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        elif report.failed and report.when != "call":
            outcome = "error"
        self.book.note(test=self._name(report.nodeid), doc="", outcome=outcome)

    def pytest_sessionfinish(self) -> None:
        """It ends."""
        self.book.close()

    def _name(self, nodeid: str) -> str:
        relative = getattr(self.config, "cwd_relative_nodeid", str)
        return str(relative(nodeid))
