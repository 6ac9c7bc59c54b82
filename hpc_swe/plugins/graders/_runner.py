"""Run tests in a sandbox and record how they ended and what they computed.

The program is sent to the sandbox as text, after those of `_apart` and `_hooks`, with calls of
`make_recorder` and `main` at its end. It shares a process with untrusted code, so its report alone proves
little; see `_sealed`.
"""

import os
import sys
from collections.abc import Iterable
from typing import Any

from hpc_swe.plugins.graders._hooks import (
    implementations,
    stay_in_process,
)  # in a sandbox, text above this one


def canonical(value: Any) -> str:  # noqa: C901, PLR0911  (one line for each kind of literal)
    """Return a text that is the same for two plain values exactly when they are equal.

    Only methods of the built-in types are called, so that a subclass cannot misrepresent its value. Raise
    AssertionError if the value, or one in it, is of no built-in type and not numpy's.
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
    raise AssertionError(f"{type(value).__name__} is not a plain value")


def _joined(kind: str, parts: Iterable[str]) -> str:
    return kind + ",".join(parts) + kind


class Recorder:
    """A pytest plugin that records the outcome of every test, including failures of setup and teardown.

    Each record leaves this process at once, sealed. Only reports that pytest itself makes are recorded.
    """

    def __init__(self, tell: Any, files: frozenset[str]) -> None:
        self._tell, self._files = tell, files
        self._config: Any = None

    def pytest_cmdline_main(self, config: Any) -> None:
        """Run all tests in this process, since those of other processes are not recorded."""
        stay_in_process(config)

    def pytest_collection(self, session: Any) -> None:
        """Learn pytest's parts now that it is complete, and only then let the work directory be imported."""
        from _pytest.runner import CallInfo

        self._config = session.config
        plugins = self._config.pluginmanager.get_plugins()
        names = {getattr(one, "__name__", None) or type(one).__module__ for one in plugins}
        packages = {name.partition(".")[0] for name in names} - {__name__}
        self._tell("learn", globals(), "\n".join(packages), vars(CallInfo)["from_call"].__func__.__code__)
        self._tell("listen", self)
        sys.path.insert(0, os.getcwd())  # noqa: PTH109

    def pytest_collection_modifyitems(self, items: Any) -> None:
        """Check where the plugins are from, and that the collected tests are those of their files."""
        self._tell("hold hooks", implementations(self._config))
        for item in items:
            self._look(item)

    def pytest_runtest_call(self, item: Any) -> None:
        """Check a test again before it runs, since it could undo what is wrong with it."""
        self._look(item)

    def pytest_runtest_makereport(self, item: Any) -> None:
        """Check a test and the plugins again when it has run."""
        self._look(item)
        self._tell("look at hooks", implementations(self._config))

    def _look(self, item: Any) -> None:
        self._tell("look at parts", item, item.session, self._config, self._config.pluginmanager)
        if item.nodeid.partition("::")[0] in self._files:
            name = getattr(item, "originalname", None) or item.name.partition("[")[0]
            self._tell("look at test", item.nodeid, name, getattr(item, "obj", None))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note which test the next answers belong to."""
        self._tell("begin", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Report a test's outcome; check at its teardown that everything it replaced is back."""
        if report.when == "teardown":
            self._tell("check")
        if report.when == "call" or not report.passed:  # a failed setup or teardown fails the test
            self._tell("report", report.nodeid, report.outcome)

    def answer(self, place: int, value: object) -> None:
        """Record `value`; the call replaces the assertion that compared it with a literal."""
        self._tell("answer", place, canonical(value))


def make_recorder(set_up: Any, report: str, files: list[str]) -> Recorder:
    """Set up the guard while no code of the patch is there."""
    import pytest  # noqa: F401

    sys.dont_write_bytecode = True
    return Recorder(set_up(report, os.getcwd(), files), frozenset(files))  # noqa: PTH109


def main(arguments: list[str]) -> None:
    """Run pytest on the recorder's tests; the report has an end only if pytest comes to its end."""
    import pytest

    Recorder.pytest_cmdline_main = pytest.hookimpl(tryfirst=True)(Recorder.pytest_cmdline_main)  # type: ignore[method-assign]
    RECORDER._tell("start")  # noqa: SLF001
    pytest.main(arguments, plugins=[RECORDER])
    RECORDER._tell("end")  # noqa: SLF001
    sys.stdout.flush()
    os._exit(0)  # no code of the patch runs from here on


RECORDER: Any = None  # where tests find it
