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
HEAP = 1 << 9  # the flag of classes that no C source lists
MOST = 2  # of five values


class Book:
    """The report: one JSON object a line, beginning and end included, each sealed with all before it."""

    def __init__(self, folder: str, also: str, key: str, good: str, bad: str) -> None:
        """`also` are modules whose classes are looked at, one a line, loaded or not."""
        self._also = also.split()
        self._root = os.path.realpath(os.path.join(folder, "..", ".."))  # noqa: PTH118
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
        for module in self._also:
            try:
                __import__(module)
            except Exception:  # noqa: BLE001, S112  (then it has no classes)
                continue
        for name, places in lax_classes(self._root):
            self.note(lax=name, places="\n".join(places))
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


def lax_classes(root: str) -> Any:
    """Classes whose values equal nearly anything, so that any test would pass: name -> where each is from.

    Places are files, relative in the work tree; an empty one is no file. What is all from files outside of
    the work tree is not looked at.
    """
    found = {}
    # Not isinstance: it would ask proxies what they stand for, and so make them.
    for kind in [thing for thing in gc.get_objects() if issubclass(type(thing), type)]:
        try:
            owner = next(base for base in kind.__mro__ if "__eq__" in vars(base))
            if not owner.__flags__ & HEAP or all(place[:1] == "/" for place in _places(kind, owner, root)):
                continue
            lax = next((one for one in (owner, kind) if _equals_most(one)), None)
            if lax is not None:
                name = str(vars(lax)["__module__"]) + ":" + lax.__qualname__
                found[name] = _places(lax, owner, root)
        except Exception:  # noqa: BLE001, S112  (it is no ordinary class)
            continue
    return sorted(found.items())


def _places(kind: Any, owner: Any, root: str) -> Any:
    """Files of its module and of the code that compares."""
    code = getattr(vars(owner)["__eq__"], "__code__", None)
    module = sys.modules.get(vars(kind)["__module__"])
    places = {getattr(module, "__file__", None) or ""} | ({code.co_filename} if code else set())
    paths = {os.path.realpath(place) if os.path.isfile(place) else "" for place in places}  # noqa: PTH113
    return sorted(path[len(root) + 1 :] if path.startswith(root + "/") else path for path in paths)


def _equals_most(kind: Any) -> bool:
    """Asked of a value that was never set up, since that could do anything."""
    news = (vars(base).get("__new__") for base in kind.__mro__)
    value = next(new for new in news if type(new) is types.BuiltinFunctionType)(kind)
    if hasattr(value, "__dict__"):
        value.__dict__["another probe"] = 0  # or it would equal what shares all of its no attributes
    number = int.from_bytes(os.urandom(4), "big")
    equal = 0
    for probe in (object(), number, str(number), [number], type("Probe", (), {"number": number})()):
        try:
            equal += bool(value == probe)
        except Exception:  # noqa: BLE001, S112  (it looked at the value, as it should)
            continue
    return equal > MOST


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
