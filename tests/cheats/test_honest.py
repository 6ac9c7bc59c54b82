"""Honest solutions and tests of many shapes are paid, though they change much of their process."""

from types import SimpleNamespace

import msgspec
import pytest

from hpc_swe.tasks.graders._inside import origins
from tests.kit.cheats.cheat_task import TASK
from tests.kit.waiting import until

HONEST = {
    "monkeypatching": (
        "import json, os\nrate = 2\ndef twice(a): return rate * a\ndef home(): return os.getcwd()\n"
        "def asked(): return input() + json.dumps(open('x').read())\n",
        """
def test_it(monkeypatch, tmp_path):
    import io, sys, types, mod
    changes = monkeypatch
    changes.setattr(mod, "rate", 3)
    changes.setattr("os.getcwd", lambda: "here")
    changes.setattr("builtins.input", lambda: "1")
    changes.setattr("builtins.open", lambda name: io.StringIO(name))
    changes.setitem(sys.modules, "absent", types.ModuleType("absent"))
    changes.setattr(mod, "sum", lambda values: 7, raising=False)
    changes.setenv("HOME", str(tmp_path))
    assert (mod.twice(2), mod.home(), mod.asked()) == (6, "here", '1"x"')
""",
    ),
    "mocks": (
        "import time\ndef wait(): time.sleep(60); return print('x')\n",
        """
import unittest
from unittest import mock
class TestIt(unittest.TestCase):
    @mock.patch("time.sleep")
    @mock.patch("builtins.print", return_value=3)
    def test_it(self, show, sleep):
        from mod import wait
        for number in range(3):
            with self.subTest(number=number):
                self.assertEqual(wait(), show.return_value)
        sleep.assert_called_with(60)
""",
    ),
    "classes and caches": (
        """
import abc, contextlib, dataclasses, enum, functools, gettext, typing
gettext.install("mod")
class Colour(enum.Enum):
    RED = 1
@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: int = dataclasses.field(default=2)
class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...
@Shape.register
class Square: pass
class Pair(typing.NamedTuple):
    a: int
@functools.lru_cache(maxsize=None)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
@functools.singledispatch
def kind(value): return "other"
@kind.register
def _(value: int): return "int"
@contextlib.contextmanager
def opened(): yield 1
class Old:
    def __call__(self): return 1
class New(Old):
    def __call__(self): return 2
def __getattr__(name): return name
""",
        """
import mod
def test_it():
    one = mod.Old()
    one.__class__ = mod.New
    with mod.opened() as opened:
        assert (one(), opened, mod.fib(30), mod.kind(1), mod.absent) == (2, 1, 832040, "int", "absent")
    assert mod.Point(1) < mod.Point(2) and isinstance(mod.Square(), mod.Shape) and mod.Pair(1).a
    assert mod.Colour(1) is mod.Colour.RED
""",
    ),
    "deep recursion": (
        "import copy\ndef deep(n):\n    value = []\n    for _ in range(n): value = [value]\n"
        "    return copy.deepcopy(value)\ndef endless(n): return endless(n + id(n))\n",
        """
import pytest
from mod import deep, endless
def test_it():
    for call in (deep, endless):
        with pytest.raises(RecursionError):
            call(99999)
""",
    ),
    "signals, threads and garbage": (
        """
import atexit, gc, signal, threading, weakref
def ring(*_): raise TimeoutError
signal.signal(signal.SIGALRM, ring)
atexit.register(print, "end")
gc.callbacks.append(lambda *_: None)
class Node: pass
def slow():
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while True: pass
def joined():
    told = []
    thread = threading.Thread(target=told.append, args=(1,))
    thread.start()
    thread.join()
    node = Node()
    node.me = node
    weakref.finalize(node, told.append, 2)
    del node
    gc.collect()
    return told
""",
        """
import pytest
from mod import joined, slow
def test_it():
    assert joined() == [1, 2]
    with pytest.raises(TimeoutError):
        slow()
""",
    ),
    "code that is made": (
        """
import collections, importlib, sys, tempfile, pathlib, types
Made = type("Made", (), {"value": property(lambda self: 1)})
Named = collections.namedtuple("Named", "a b")
def loaded():
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "made_up.py").write_text("value = 3")
    sys.path.insert(0, str(folder))
    made = importlib.import_module("made_up")
    return importlib.reload(made).value
def again(function):
    return types.FunctionType(function.__code__, {"len": lambda value: 9})
def size(): return len("")
""",
        """
import mod
def test_it():
    assert (mod.loaded(), mod.Made().value, mod.Named(1, 2).b, mod.again(mod.size)()) == (3, 1, 2, 9)
""",
    ),
    "an installed package that loads ctypes": (
        "from multiprocessing import sharedctypes\ndef types(): return sharedctypes.typecode_to_type\n",
        "from mod import types\ndef test_it():\n    assert len(types()) > 5\n",
    ),
}


@pytest.mark.parametrize(("text", "test"), HONEST.values(), ids=HONEST.keys())
def test_honest_solutions_are_paid(grade, text, test):
    name = "test_hidden.py::TestIt::test_it" if "class TestIt" in test else "test_hidden.py::test_it"
    plan = msgspec.structs.replace(
        TASK.tests, files={"test_hidden.py": test}, fail_to_pass=[name], pass_to_pass=[]
    )
    score = grade(msgspec.structs.replace(TASK, tests=plan), mod__py=text)
    assert score.outcome == "resolved", score


CONFTEST = """
import pytest


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.name)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    yield
"""


@pytest.mark.parametrize("is_test", [True, False])
def test_hooks_of_the_task_in_a_folder_of_its_own_are_no_cheat(grade, is_test):
    tests = {"sub/test_hidden.py": "from mod import one\n\n\ndef test_it():\n    assert one() == 1\n"}
    conftest = {"sub/conftest.py": CONFTEST}
    plan = msgspec.structs.replace(
        TASK.tests,
        command="python -m pytest .",
        files=tests | (conftest if is_test else {}),
        fail_to_pass=["sub/test_hidden.py::test_it"],
        pass_to_pass=[],
    )
    files = {"mod.py": "", **({} if is_test else conftest)}
    score = grade(msgspec.structs.replace(TASK, tests=plan, files=files), mod__py="def one(): return 1\n")
    assert score.outcome == "resolved", score


def test_a_link_that_the_host_makes_of_an_image_s_file_blames_nobody(tmp_path):
    """The kernel notes the time of a new link and of a change alike; code under test can make one, too."""
    (tmp_path / "report").touch()
    library = tmp_path / "installed/library.py"
    library.parent.mkdir()
    library.write_text("x = 1\n")
    until(lambda: _newer(library, tmp_path / "report"))
    code = compile("x = 1\n", str(library), "exec")
    began_ns = (tmp_path / "report").stat().st_ctime_ns
    guard = SimpleNamespace(began_ns=began_ns, root=str(tmp_path / "tree"), must_compare=False)
    guard.installed, guard.young, told = (f"{library.parent}/",), set(), []
    guard.note = lambda young: told.append(young)
    assert origins.is_installed(guard, code), "no code under test has run"
    assert not told
    assert origins.place(guard, str(library)) == "", "it may have run"
    assert told == [str(library)], "the grader asks whether the image has it so"
    guard.must_compare = True
    assert not origins.is_installed(guard, code), "events do not tell whether it has run"


def _newer(file, than):
    """Link a file again; tell whether its time is later, since clocks of file systems tick seldom."""
    link = file.with_name("link")
    link.unlink(missing_ok=True)
    link.hardlink_to(file)
    return file.stat().st_ctime_ns > than.stat().st_ctime_ns
