"""What a test means is not the submission's to decide: helpers of the tests and test modules beside code."""

import json
from pathlib import Path

import pytest

from hpc_swe.tasks.graders._inside.support import support_files
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.tasks.swebench_rows import TESTS
from tests.kit.toy import BROKEN, MENDED, Checkout, make_repository, new, patch, row, taskset, write_rows

ONCE = Swebench(second_sittings=0)
SAME = "def require_same(one, other):\n    assert one == other\n"
LAX = "def require_same(one, other):\n    pass\n"
BESIDE = "from calc.core import double\n\n\ndef test_double():\n    assert double(4) == 8\n"
HELPED = """from calc.core import add
from qa.same import require_same


def test_add():
    require_same(add(1, 2), 3)
"""
MORE = {
    "qa/__init__.py": "",
    "qa/same.py": SAME,
    "tests/test_old.py": "from qa.same import require_same\n\n\ndef test_old():\n    require_same(1, 1)\n",
    "calc/test_core.py": BESIDE,
    "calc/other.py": "def other():\n    return 1\n",
}


@pytest.fixture(scope="module")
def helped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("helped") / "repository"
    return folder, make_repository(folder, MORE)


def grade(folder: Path, repository: tuple[Path, str], submission: str) -> str:
    names = {
        "FAIL_TO_PASS": json.dumps(["tests/test_helped.py::test_add"]),
        "PASS_TO_PASS": json.dumps(["calc/test_core.py::test_double"]),
    }
    tests = new("tests/test_helped.py", HELPED) + patch("calc/test_core.py", BESIDE, BESIDE + "\n\nX = 1\n")
    one_row = row("pytest", repository[1], test_patch=tests, **names)
    (one,) = taskset(write_rows(folder / "rows.jsonl", one_row)).load("train")
    return ONCE.grade(one, submission, Checkout(repository=str(repository[0]))).outcome


@pytest.mark.parametrize(
    "cheat",
    [
        patch("qa/same.py", SAME, LAX),
        new("qa/same/__init__.py", LAX),
        patch("calc/test_core.py", BESIDE, "def test_double():\n    pass\n"),
    ],
    ids=["changes a helper", "hides a helper", "changes a test beside code"],
)
@pytest.mark.parametrize("core", [BROKEN, MENDED], ids=["unsolved", "solved"])
def test_helpers_of_tests_stay_as_they_were(tmp_path, helped, core, cheat):
    other = patch("calc/core.py", BROKEN, core + "\n\nmore = 1\n")
    assert grade(tmp_path, helped, cheat + other) == ("resolved" if core == MENDED else "unresolved")


def test_a_stray_test_module_of_the_agent_is_left_out(tmp_path, helped):
    stray = new("calc/test_scratch.py", "import sys\nsys.exit(0)\n") + new(
        "test_repro.py", "import missing\n"
    )
    assert grade(tmp_path, helped, patch("calc/core.py", BROKEN, MENDED) + stray) == "resolved"


def test_code_that_nothing_but_its_solution_imports_can_be_changed(tmp_path, helped):
    moved = BROKEN.replace("a - b", "plus(a, b)").replace(
        "def add", "from calc.other import plus\n\n\ndef add"
    )
    plus = MORE["calc/other.py"] + "\n\ndef plus(a, b):\n    return a + b\n"
    submission = patch("calc/core.py", BROKEN, moved) + patch("calc/other.py", MORE["calc/other.py"], plus)
    assert grade(tmp_path, helped, submission) == "resolved"


CODE = {"calc/core.py": "from .used import used\n", "calc/used.py": "def used():\n    assert True\n"}
MIXIN = "class Cases:\n    def test_it(self):\n        assert self.it() == 1\n"
LEAF = "def leaf():\n    return 1\n"
PAIR = {"qa/a.py": "from . import b\n", "qa/b.py": "", "tests/test_a.py": "from qa import (\n    a,\n)\n"}
TOOL = {"far/tool.py": "if __name__ == '__main__':\n    run()\n", "test_a.py": "import far.tool\n"}
LAZY = {"calc/lazy.py": SAME, "calc/core.py": "load('calc.lazy')\n", "test_a.py": "import calc.lazy\n"}


@pytest.mark.parametrize(
    ("files", "words", "found"),
    [
        ({"qa.py": SAME, "test_a.py": "import qa\n"}, "", "qa.py"),
        ({"qa.py": SAME, "calc/core.py": "import qa\n", "test_a.py": "import qa\n"}, "", ""),
        ({"qa.py": SAME, "test_a.py": "from calc import core\n"}, "", ""),
        (PAIR, "", "qa/a.py qa/b.py"),
        ({"tests/test_a.py": "import calc.used, calc.core\n"}, "", ""),
        ({"calc/qa.py": SAME, "calc/test_a.py": "from .qa import require_same\n"}, "", "calc/qa.py"),
        ({"calc/cases.py": MIXIN, "calc/test_a.py": "from .cases import Cases\n"}, "", "calc/cases.py"),
        ({"calc/leaf.py": LEAF, "calc/test_a.py": "from .leaf import leaf\n"}, "", ""),
        ({"far/leaf.py": LEAF, "test_a.py": "from far.leaf import leaf\n"}, "", "far/leaf.py"),
        ({"far/leaf.py": LEAF, "test_a.py": "from far.leaf import leaf\n"}, "Use `far.leaf` here.", ""),
        (TOOL, "", ""),
        ({"qa/plugin.py": SAME, "conftest.py": "pytest_plugins = ['qa.plugin']\n"}, "", "qa/plugin.py"),
        ({"plug.py": SAME}, 'addopts = "-p plug"', "plug.py"),
        ({"src/far/leaf.py": SAME, "tests/test_a.py": "from far.leaf import x\n"}, "", "src/far/leaf.py"),
        ({"calc/json.py": SAME, "tests/test_a.py": "import json\n"}, "", ""),
        (LAZY, "", ""),
    ],
)
def test_a_module_that_only_tests_import_is_found_by_their_imports(files, words, found):
    assert support_files(CODE | files, [words], TESTS, ["calc/core.py"]) == found.split()
