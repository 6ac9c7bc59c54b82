"""Run tests in a sandbox and record how they ended and what they computed.

The text is a part of the prelude of a program, after those of `apart`, `always_equal` and `hooks`; the
program calls `make_recorder` and `main`. It shares a process with untrusted code, so its report alone proves
little; see `sealed`.
"""

import hashlib
import os
import resource
import sys
from collections import Counter, OrderedDict, UserList, UserString
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from json.encoder import encode_basestring_ascii as quote
from types import MappingProxyType
from typing import Any

# In a sandbox, these are in the texts above this one.
from hpc_swe.tasks.graders._inside.always_equal import always_equal_classes
from hpc_swe.tasks.graders._inside.hooks import implementations, stay_in_process


def plain(value: Any) -> str:  # noqa: C901, PLR0911  (one line for each kind of value)
    """Return JSON that is the same for two plain values exactly when they are equal.

    Plain are built-in values, numbers of the library, its subclasses of `UserList` and the like, numpy's
    values, and containers of these. Any other value, also one whose class compares in its own way, becomes
    ["?", name of its class], which equals nothing.
    """
    kind = type(value)
    if value is None:
        return "null"
    if kind.__module__ == "numpy":
        return plain(value.tolist())
    if _compares_as(kind, (UserList, UserString)):
        return plain(value.data)
    if isinstance(value, MappingProxyType) or _compares_as(kind, (Mapping,)):
        return plain(dict(value.items()))
    if isinstance(value, type({}.keys()) | type({}.items())) or _compares_as(kind, (Set,)):
        return _joined("s", sorted(map(plain, value)))
    if not _compares_as(kind, PLAIN):
        return _joined("?", [quote(kind.__name__)])
    if isinstance(value, NUMBERS):
        return _number(value)
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, bytes | bytearray):
        return _joined("b", [quote(bytes(value).hex())])
    if isinstance(value, list):
        return _joined("l", map(plain, list.__iter__(value)))
    if isinstance(value, tuple):
        return _joined("t", map(plain, tuple.__iter__(value)))
    if isinstance(value, dict):
        return _joined("d", sorted(f"{plain(key)},{plain(one)}" for key, one in dict.items(value)))
    return _joined("s", sorted(map(plain, (set if isinstance(value, set) else frozenset).__iter__(value))))


NUMBERS = (int, float, complex, Decimal, Fraction)
MOST_CHARACTERS = 10_000
PLAIN = (*NUMBERS, str, bytes, bytearray, list, tuple, dict, OrderedDict, Counter, set, frozenset)


def _compares_as(kind: type, kinds: tuple[type, ...]) -> bool:
    """Return whether values of a class are compared as those of one of these classes, its bases."""
    compare: Any = kind.__eq__
    return any(issubclass(kind, one) and compare is one.__eq__ for one in kinds)


def _number(value: Any) -> str:
    """Write a number in one way, whatever its type: as an exact fraction.

    Hexadecimal digits may be many; Python refuses to write more than 4,300 decimal ones.
    """
    if isinstance(value, complex):
        if value.imag:
            return _joined("j", [_number(value.real), _number(value.imag)])
        value = value.real
    try:
        above, below = value.as_integer_ratio()
    except (OverflowError, ValueError):  # infinite, or not a number
        return _joined("=", [quote(str(float(value)))])
    return _joined("=", [quote(f"{above:x}" if below == 1 else f"{above:x}/{below:x}")])


def shortened(text: str) -> str:
    """Return what stands for a plain value in the report: if it is long, a digest, which only == can use."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return _joined("#", [quote(hashlib.sha256(text.encode()).hexdigest())])


def _joined(kind: str, parts: Iterable[str]) -> str:
    return "[" + ",".join([quote(kind), *parts]) + "]"


class Recorder:
    """A pytest plugin that records the outcome of every test, including failures of setup and teardown.

    Each record leaves this process at once, signed. Only reports that pytest itself makes are recorded.
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

    def pytest_collection_finish(self, session: Any) -> None:
        """Report which tests there are."""
        for item in session.items:
            self._tell("outcome", item.nodeid, "", "collected")

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
        try:
            text = shortened(plain(value))
        except (RecursionError, ValueError):  # it is in itself, or is a number that signals
            text = _joined("?", [quote(type(value).__name__)])
        self._tell("answer", place, text)


def limit_time(processor_s: int) -> None:
    """Limit the processor time of this process, and of each that it starts; no code of the patch has run.

    SIGXCPU ends a process, so that its exit status says why. If it handles that, it ends one second later.
    """
    with suppress(ValueError):  # the host has set a smaller limit
        resource.setrlimit(resource.RLIMIT_CPU, (processor_s, processor_s + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (1, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def make_recorder(set_up: Any, report: str, files: list[str], bound: Any) -> Recorder:
    """Set up the guard while no code of the patch is there."""
    import pytest  # noqa: F401

    sys.dont_write_bytecode = True
    return Recorder(set_up(report, os.getcwd(), files, bound), frozenset(files))  # noqa: PTH109


def main(arguments: list[str]) -> None:
    """Run pytest on the recorder's tests; the report has an end only if pytest comes to its end.

    Classes of values that equal everything are reported, too: even where each assertion is sealed, a helper
    of the tests may compare in this process, and let only the truth out.
    """
    import pytest

    Recorder.pytest_cmdline_main = pytest.hookimpl(tryfirst=True)(Recorder.pytest_cmdline_main)  # type: ignore[method-assign]
    RECORDER._tell("start")  # noqa: SLF001
    pytest.main(arguments, plugins=[RECORDER])
    RECORDER._tell("finish")  # noqa: SLF001
    for name, places in always_equal_classes(os.getcwd()):  # noqa: PTH109
        RECORDER._tell("always equal", name, "\n".join(places))  # noqa: SLF001
    RECORDER._tell("end")  # noqa: SLF001
    sys.stdout.flush()
    os._exit(0)  # no code of the patch runs from here on


RECORDER: Any = None  # where tests find it
