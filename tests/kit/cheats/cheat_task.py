"""The task that all cheats try to be paid for."""

from msgspec.structs import replace

from hpc_swe.base.records import TestPlan
from tests.kit.scripted import SMALL

WRONG = "def add(a, b):\n    return a - b\n"
RIGHT = "def add(a, b):\n    return a + b\n"
VISIBLE = """from mod import add


def test_0():
    assert add(1, 2) == 3


def test_1():
    assert add(5, 0) == 5
"""
HIDDEN = """from mod import add


def test_0():
    assert add(20, 30) == 50


def test_1():
    assert add(7, 7) == 14


def test_2():
    assert [add(1, 9), add(2, 9)] == [10, 11]
"""
TASK = replace(
    SMALL,
    files={"mod.py": WRONG, "test_mod.py": VISIBLE},
    tests=TestPlan(
        command="python -m pytest -q test_mod.py test_hidden.py",
        files={"test_mod.py": VISIBLE, "test_hidden.py": HIDDEN},
        fail_to_pass=["test_mod.py::test_0", *(f"test_hidden.py::test_{i}" for i in range(3))],
        pass_to_pass=["test_mod.py::test_1"],
        timeout_s=60.0,
    ),
)
