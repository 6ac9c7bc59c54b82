"""Honest solutions and tests of many shapes are paid, though they change much of their process."""

from types import SimpleNamespace

import msgspec
import pytest

from hpc_swe.tasks.graders._inside import origins
from tests.kit.cheats.cheat_task import TASK
from tests.kit.waiting import until

HONEST = {
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
}


@pytest.mark.parametrize(("text", "test"), HONEST.values(), ids=HONEST.keys())
def test_honest_solutions_are_paid(grade, text, test):
    names = ["test_hidden.py::test_it"]
    plan = msgspec.structs.replace(
        TASK.tests, files={"test_hidden.py": test}, fail_to_pass=names, pass_to_pass=[]
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
