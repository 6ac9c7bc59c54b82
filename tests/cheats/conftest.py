"""The task that all cheats try to be paid for, and where it is graded."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_swe.plugins.agents.submission import difference
from hpc_swe.plugins.graders.pytest import Pytest
from hpc_swe.plugins.sandboxes.apptainer import Apptainer
from hpc_swe.plugins.sandboxes.base import Sandboxes
from hpc_swe.plugins.sandboxes.process import Process
from hpc_swe.records import Score, Task, TestPlan

IMAGES = Path(__file__).parents[2] / ".cache" / "images"
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
TASK = Task(
    task_id="t",
    taskset="cheats",
    prompt="",
    image="python-pytest",
    workdir="/work",
    files={"mod.py": WRONG, "test_mod.py": VISIBLE},
    tests=TestPlan(
        command="python -m pytest -q test_mod.py test_hidden.py",
        files={"test_mod.py": VISIBLE, "test_hidden.py": HIDDEN},
        fail_to_pass=["test_mod.py::test_0", *(f"test_hidden.py::test_{i}" for i in range(3))],
        pass_to_pass=["test_mod.py::test_1"],
        timeout_s=10.0,
    ),
)
Grade = Callable[..., Score]


@pytest.fixture(params=["process", pytest.param("apptainer", marks=pytest.mark.slow)])
def sandboxes(request: pytest.FixtureRequest) -> Sandboxes:
    if request.param == "process":
        return Process()
    if shutil.which("apptainer") is None or not (IMAGES / "python-pytest.sif").exists():
        pytest.skip("Apptainer or its task image is missing: containers/build_image.sh")
    return Apptainer(images=str(IMAGES))


@pytest.fixture
def grade(sandboxes: Sandboxes) -> Grade:
    def grade(task: Task = TASK, grader: Pytest | None = None, **files: str | None) -> Score:
        """Score the task with these files changed; double underscores in names are dots."""
        changes = {name.replace("__", "."): text for name, text in files.items()}
        parts = [difference(path, task.files.get(path), text) for path, text in sorted(changes.items())]
        return (grader or Pytest()).grade(task, "".join(parts), sandboxes)

    return grade
