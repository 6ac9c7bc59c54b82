"""Report how tests ended, from inside the process that runs them and independent of what it prints.

The sandbox gets this text after those of `apart`, `always_equal` and `hooks`, with a call of `watch` at
its end, as the ``sitecustomize`` of a folder that stands first on PYTHONPATH. The first Python process of the
command loads it before any code of the work tree. It loads the real unittest and pytest, sets up the guard,
which holds all secrets (`guard`), and reports the first test run of that process. Images bring their own
interpreter, so the text runs under Python 3.6 and later. It shares the process with untrusted code.
"""

import os
import random
import shutil
import sys
import types
import unittest
from functools import partial
from typing import Any, Callable  # noqa: UP035

# In a sandbox, these are in the texts above this one.
from hpc_swe.tasks.graders._inside.always_equal import always_equal_classes
from hpc_swe.tasks.graders._inside.hooks import implementations, stay_in_process


def watch(set_up: Any, folder: str, kind: str, modules: str, files: Any, *canaries: str) -> None:
    """Report the tests of this process if it is the first; its children find nothing of the reporter.

    `set_up` makes the guard. The classes of `modules`, one a line, are examined at the end. The first two
    canaries are put around the tests: one must pass and one must fail. The others must fail too and are put
    between the tests.
    """
    root = os.path.realpath(os.path.join(folder, "..", ".."))  # noqa: PTH118
    try:
        tell = set_up(folder + ".report", root, files)
    except FileExistsError:
        return
    shutil.rmtree(folder)
    sys.modules["sitecustomize"] = types.ModuleType("sitecustomize")
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    _restore_variable("PYTHONPATH")
    if kind == "pytest":
        _load_pytest(root)
    # A test that raises unittest's exception of this name would pass; an empty tuple catches no exception.
    unittest.case._ShouldStop = ()  # type: ignore[attr-defined]  # noqa: SLF001
    tell("learn", globals())
    close = partial(_close, tell, modules, root)
    (watch_unittest if kind == "unittest" else watch_pytest)(tell, canaries, close)


def _load_pytest(root: str) -> None:
    """Load the installed pytest, if any outside the work tree, before the work tree can offer another one."""
    paths = list(sys.path)
    sys.path[:] = [path for path in paths if not (os.path.realpath(path) + "/").startswith(root + "/")]
    try:
        from _pytest.config import default_plugins

        for name in default_plugins:
            __import__("_pytest." + name)
    except ImportError:
        return
    finally:
        sys.path[:] = paths


def _close(tell: Any, modules: str, root: str) -> None:
    """End the report with the classes whose values equal nearly anything."""
    tell("check")
    tell("finish")
    for module in modules.split():
        try:
            __import__(module)
        except Exception:  # noqa: BLE001, S112  (a module that cannot be imported has no classes)
            continue
    for name, places in always_equal_classes(root):
        tell("always equal", name, "\n".join(places))
    tell("end")


def _restore_variable(name: str) -> None:
    before = os.environ.pop("HPC_SWE_" + name, "")
    os.environ.pop(name, None)
    if before:
        os.environ[name] = before


def watch_unittest(tell: Any, canaries: Any, close: Any) -> None:
    """Record the first run of a `unittest.TextTestRunner`, Django's included."""
    original = unittest.TextTestRunner.run

    def run(self: Any, test: Any) -> Any:
        unittest.TextTestRunner.run = original  # type: ignore[method-assign]
        tell("check")
        self.resultclass = recording(self.resultclass, tell, canaries)
        tell("hold class", self.resultclass)
        places = list(_leaves(test))
        like = type(places[0][2]) if places else unittest.TestCase
        suite = unittest.TestSuite([_plain(like, canaries[0], 1), test, _plain(like, canaries[1], 2)])
        for kind in {type(place[2]) for place in places}:
            tell("look at names", sys.modules.get(kind.__module__, unittest), {"unittest": unittest})
        for place in places:
            _look(tell, place[2])
        bodies = [*FAILS[:2], *random.SystemRandom().sample(FAILS[2:], len(FAILS) - 2)]
        for name, body in zip(() if self.failfast else canaries[2:], bodies):  # noqa: B905
            _hide(name, body, places, tell)
        result = original(self, suite)
        close()
        return result

    unittest.TextTestRunner.run = run  # type: ignore[method-assign]


def _leaves(suite: Any) -> Any:
    tests = getattr(suite, "_tests", None)
    for place, test in enumerate(tests if type(tests) is list else []):
        if isinstance(test, unittest.TestCase):
            yield suite, place, test
        else:
            yield from _leaves(test)


def _plain(like: Any, name: str, number: int) -> Any:
    """Make a canary whose names look like those of a test's class; it passes if `number` is 1."""

    def method(self: Any) -> None:
        self.assertEqual(number, 1)  # noqa: PT009

    names = {"__module__": like.__module__, "__qualname__": like.__qualname__, "test_" + name: method}
    return type(like.__name__, (unittest.TestCase,), names)("test_" + name)


FAILS = (
    "self.assertEqual(%d, %d)",
    "\n        with self.subTest(x=%d):\n            self.assertEqual(1, %d)",
    "self.assertTrue(%d > %d)",
    "self.assertIn(%d, [%d])",
    "assert %d == %d",
    "self.assertRaises(ValueError, int, %d + %d)",
    "\n        with self.assertRaises(ValueError):\n            %d, %d",
    "raise ValueError(%d, %d)",
)


def _canary(name: str, arguments: str, body: str, file: str, names: Any) -> Any:
    number = random.SystemRandom().randrange(2, 999)
    found: Any = {}
    text = "\n" * number + "def test_" + name + "(" + arguments + "):\n    " + body % (number, number + 1)
    exec(compile(text, file, "exec"), names, found)
    return found["test_" + name]


def _hide(name: str, body: str, places: Any, tell: Any) -> None:
    """Insert a canary that must fail into a class of the tests, next to one of them."""
    chance = random.SystemRandom()
    if not places:
        return
    suite, _, like = chance.choice(places)
    if _is_failed_import(like):
        return
    kind = type(like)
    module = sys.modules.get(kind.__module__)
    try:
        file = getattr(module, "__file__", None) or "test"
        setattr(kind, "test_" + name, _canary(name, "self", "if True:\n        " + body, file, vars(module)))
        test = kind("test_" + name)
    except Exception:  # noqa: BLE001  (this class takes no more tests)
        return
    tell("canary", name, kind.__module__ + "." + kind.__qualname__ + ".")
    suite._tests.insert(next(n for n, one in enumerate(suite._tests) if one is like), test)  # noqa: SLF001


def recording(base: Any, tell: Any, canaries: Any) -> Any:
    """Make a class of results that reports each outcome before the base class gets it."""
    case, name_of = unittest.TestCase, unittest.TestCase.id
    frame, look, text = sys._getframe, _look, getattr  # noqa: SLF001

    def recorder(method: str, outcome: str) -> Callable[..., None]:
        def record(self: Any, test: Any, *rest: Any) -> None:
            label = name_of(test) if isinstance(test, case) else test.id()
            if outcome == "passed":
                tell("look at pass", test, self, frame(1).f_code)
            if isinstance(test, case) and not label.endswith(canaries):
                look(tell, test)
            tell("check")
            tell("outcome", label, test.shortDescription() or "", outcome)
            text(base, method)(self, test, *rest)

        return record

    def add_sub_test(self: Any, test: Any, subtest: Any, error: Any) -> None:
        if error is not None:
            tell("outcome", name_of(test), test.shortDescription() or "", "failed")
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
    for function in members.values():
        tell("hold function", function)
    return type("Recorded", (base,), members)


def _is_failed_import(test: Any) -> bool:
    """Return whether unittest made a test only to report that a module cannot be imported."""
    return type(test).__module__.partition(".")[0] == "unittest"


def _look(tell: Any, test: Any) -> None:
    if _is_failed_import(test):
        return
    name = vars(test).get("_testMethodName", "")
    spaces = [vars(test)] + [vars(kind) for kind in type(test).__mro__]
    tell("look at case", test)
    file = getattr(sys.modules.get(type(test).__module__), "__file__", None)
    function = next((space[name] for space in spaces if name in space), None)
    tell("look at test", str(name), name, function, file)


def watch_pytest(tell: Any, canaries: Any, close: Any) -> None:
    """Record the first session, as the plugin that PYTEST_PLUGINS names."""
    name = os.environ.get("PYTEST_PLUGINS", "").partition(",")[0]
    plugin: Any = types.ModuleType(name, "PYTEST_DONT_REWRITE")

    def listen(early_config: Any) -> None:
        import pytest

        first, last = pytest.hookimpl(tryfirst=True), pytest.hookimpl(trylast=True)
        Listener.pytest_cmdline_main = first(Listener.pytest_cmdline_main)  # type: ignore[method-assign]
        Listener.pytest_sessionstart = first(Listener.pytest_sessionstart)  # type: ignore[method-assign]
        Listener.pytest_runtest_makereport = first(Listener.pytest_runtest_makereport)  # type: ignore[method-assign]
        Listener.pytest_collection_modifyitems = last(Listener.pytest_collection_modifyitems)  # type: ignore[method-assign]
        listener = Listener(tell, canaries, close, early_config)
        tell("listen", listener)
        early_config.pluginmanager.register(listener)

    # These hooks are called before any conftest is loaded.
    plugin.pytest_addoption = lambda parser: _restore_variable("PYTEST_PLUGINS")
    plugin.pytest_load_initial_conftests = listen
    sys.modules[name] = plugin


class Listener:
    """A pytest plugin that reports every outcome, including failures of setup, teardown and collection."""

    def __init__(self, tell: Any, canaries: Any, close: Any, config: Any) -> None:
        self._tell = tell
        self._canaries = canaries
        self._close = close
        self._config = config

    def pytest_cmdline_main(self, config: Any) -> None:
        """Run all tests in this process, since those of other processes are not seen; see `hooks`."""
        stay_in_process(config)

    def pytest_sessionstart(self) -> None:
        """Learn pytest's parts again: all plugins are loaded now, and no test is."""
        self._tell("learn again")

    def pytest_collection_modifyitems(self, items: Any) -> None:
        """Check the collected tests and the plugins, and insert the canaries."""
        import pytest

        names = {"pytest": pytest, "raises": pytest.raises, "approx": pytest.approx, "unittest": unittest}
        for module in {getattr(item, "module", None) for item in items} - {None}:
            self._tell("look at names", module, names)
        for item in items:
            self._tell("look at test", item.nodeid, *_function(item))
        self._tell("hold hooks", implementations(self._config))
        self._tell("check")
        _surround(items, self._canaries, self._tell, self._config)

    def pytest_collectreport(self, report: Any) -> None:
        """Report a file that cannot be imported as an error under its name."""
        if report.failed:
            self._tell("check")
            self._tell("outcome", self._name(report.nodeid), "", "error")

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Check that the function that was called is the one that was collected."""
        if call.when == "call" and not item.name.endswith(self._canaries):
            self._tell("look at test", item.nodeid, *_function(item))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Report an outcome; check at teardown that everything that the test replaced is back."""
        if report.when == "teardown":
            self._tell("check")
        if report.when != "call" and report.passed:
            return
        outcome = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        elif report.failed and report.when != "call":
            outcome = "error"
        self._tell("look at hooks", implementations(self._config))
        # The grader keeps the worst outcome of a test, so a later report cannot undo an earlier one.
        self._tell("outcome", self._name(report.nodeid), "", outcome)

    def pytest_sessionfinish(self) -> None:
        self._close()

    def _name(self, nodeid: str) -> str:
        return str(getattr(self._config, "cwd_relative_nodeid", str)(nodeid))


def _function(item: Any) -> Any:
    """Return name and function of an item; for an item that is no function its collector is trusted."""
    function = getattr(item, "obj", None)
    return getattr(item, "originalname", None) or item.name.partition("[")[0], function


RAISES = (
    "assert %d == %d",
    "assert %d > %d",
    "raise ValueError(%d, %d)",
    "import pytest\n    with pytest.raises(ValueError):\n        %d, %d",
    "import pytest\n    assert %d == pytest.approx(%d)",
)


def _surround(items: Any, canaries: Any, tell: Any, config: Any) -> None:
    """Insert one canary before all tests, one after them, and others between them, in their modules."""
    import pytest

    chance = random.SystemRandom()
    modules = [item.getparent(pytest.Module) for item in items]
    modules = [module for module in modules if module is not None]
    if not modules:
        return
    make = getattr(pytest.Function, "from_parent", None)

    def canary(parent: Any, name: str, body: str) -> Any:
        test = _canary(name, "", body, str(parent.fspath), vars(parent.obj))
        if make:
            return make(parent, name="test_" + name, callobj=test)
        return pytest.Function("test_" + name, parent, callobj=test)

    for name in () if config.getvalue("maxfail") else canaries[2:]:
        place = chance.randrange(len(items) + 1)
        parent = chance.choice(modules)
        tell("canary", name, parent.nodeid)
        items.insert(place, canary(parent, name, chance.choice(RAISES)))
    items.insert(0, canary(modules[0], canaries[0], "assert %d != %d"))
    items.append(canary(modules[0], canaries[1], RAISES[0]))
