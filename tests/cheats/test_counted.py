"""Every test that pytest collects counts, and no right program loses by a test that cannot pass."""

import json
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.records import Task, TestPlan
from hpc_swe.tasks.graders._exam import Exam, TestReport
from hpc_swe.tasks.graders._inside.runner import plain
from hpc_swe.tasks.graders._sealing.sealed import seal
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.patch import difference
from hpc_swe.tasks.sets.programs import Programs

BROKEN = "def f(n):\n    return n * 2\n"
RIGHT = "def f(n):\n    return n * 3\n"
WRONG = "def f(n):\n    return n * 3 if n < 5 else 0\n"
HEAD = "import pytest, sys, unittest\nfrom mod import f\n"
FOUR = "".join(f"\ndef test_{n}():\n    assert f({n}) == {3 * n}\n" for n in range(1, 4))
FIVE = "self.assertEqual(f(5), 15)"
UNSEEN = {
    "an async case": f"""
class Five(unittest.IsolatedAsyncioTestCase):
    async def test_five(self):
        {FIVE}
""",
    "a nested class": """
class TestOuter:
    class TestInner:
        def test_five(self):
            assert f(5) == 15
""",
    "a test under if": """
if sys.version_info > (3,):
    def test_five():
        assert f(5) == 15
""",
    "a mixin": f"""
class Mixed:
    def test_five(self):
        {FIVE}
class Five(Mixed, unittest.TestCase):
    pass
""",
    "an assigned function": """
def make(n):
    def check():
        assert f(n) == 3 * n
    return check
test_five = make(5)
""",
    "parameters": """
@pytest.mark.parametrize('n, want', [(1, 3), (5, 15)])
def test_p(n, want):
    assert f(n) == want
""",
    "a base class of another name": f"""
Base = unittest.TestCase
class Five(Base):
    def test_five(self):
        {FIVE}
""",
}
HARMLESS = {
    "a fixture": """
@pytest.fixture
def test_number():
    return 1
def test_with(test_number):
    assert f(test_number) == 3
""",
    "a skipped test": """
@pytest.mark.skip(reason='slow')
def test_slow():
    assert f(9) == 27
""",
    "a test for another system": """
@pytest.mark.skipif(True, reason='x')
def test_windows():
    assert f(1) == 3
""",
    "a test that skips itself": """
def test_it():
    pytest.skip('not here')
    assert f(1) == 3
""",
    "an expected failure": """
@pytest.mark.xfail
def test_known():
    assert f('a') == 3
""",
    "unittest's own skips": """
class Cases(unittest.TestCase):
    @unittest.skip('x')
    def test_a(self):
        assert f(1) == 3
    @unittest.expectedFailure
    def test_b(self):
        self.assertEqual(f(1), 4)
""",
    "a helper that is no test": """
class Helper:
    def test_nothing(self):
        assert False
""",
}
OWN = """class V:
    def __init__(self, *xs): self.xs = xs
    def __eq__(self, other): return self.xs == tuple(other)
    def __iter__(self): return iter(self.xs)
def f(n): return V(n, n + {step})
"""
ANY = """class Any:
    def __init__(self, *xs): pass
    def __eq__(self, other): return True
    def __iter__(self): return iter((0, 0))
def f(n): return Any()
"""


def task_of(folder: Path, tests: str, program: str = BROKEN) -> Task:
    row = {
        "task_id": "a",
        "files": [{"path": "mod.py", "content": program}, {"path": "test.py", "content": tests}],
    }
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (task,) = Programs(eval=str(folder / "rows.jsonl")).load("eval")
    return task


def graded(task: Task, program: str) -> tuple[str, list[str]]:
    score = Pytest().examine(task, difference("mod.py", task.files["mod.py"], program), Process())
    return score.outcome, score.failed


@pytest.mark.parametrize("more", UNSEEN.values(), ids=UNSEEN.keys())
def test_every_collected_test_counts(tmp_path: Path, more: str) -> None:
    task = task_of(tmp_path, HEAD + FOUR + "\n" + more)
    outcome, failed = graded(task, WRONG)
    assert outcome == "unresolved"
    assert len(failed) == 1
    assert graded(task, RIGHT) == ("resolved", [])


MIXED = f"class Mixed:\n    def test_five(self):\n        {FIVE}\n".replace("f(5)", "self.f(5)")
INHERITS = "class Five(Mixed, unittest.TestCase):\n    f = staticmethod(f)\n"
CASES = {
    "tests alone": (MIXED, f"from cases import Mixed\n{INHERITS}"),
    "tests and a helper": (f"class Helper: pass\n{MIXED}", f"from cases import Mixed\n{INHERITS}"),
    "by its module": (
        f"ONE = 1\ndef help(): pass\n{MIXED}",
        f"import cases\n{INHERITS}".replace("Mixed", "cases.Mixed"),
    ),
    "imported tests": (
        "from mod import f\ndef help(): pass\nclass TestFive:\n"
        "    def test_five(self):\n        assert f(5) == 15\n",
        "from cases import TestFive\n",
    ),
}


@pytest.mark.parametrize(("cases", "tests"), CASES.values(), ids=CASES.keys())
def test_a_patch_cannot_change_tests_that_others_inherit(tmp_path: Path, cases: str, tests: str) -> None:
    task = task_of(tmp_path, HEAD + tests)
    task = msgspec.structs.replace(task, files=task.files | {"cases.py": cases})
    lax = cases.replace("self.assertEqual(self.f(5), 15)", "pass").replace("assert f(5) == 15", "pass")
    solved, unsolved = (difference("mod.py", BROKEN, program) for program in (RIGHT, WRONG))
    emptied = difference("cases.py", cases, lax)
    assert Pytest().grade(task, emptied + unsolved, Process()).outcome == "unresolved"
    assert Pytest().grade(task, emptied + solved, Process()).outcome == "resolved"
    hidden = difference("cases/__init__.py", "", lax)
    assert Pytest().grade(task, hidden + unsolved, Process()).outcome != "resolved"


CLIENT = """class Client:
    def __init__(self, step=2): self.step = step
    def test_connection(self): return self.step
    def f(self, n): return self.test_connection() * n
"""
FAKE = "from mod import Client\nclass Fake(Client):\n    pass\n\n" + FOUR.replace("f(", "Fake().f(")


def test_a_program_may_have_methods_named_as_tests(tmp_path: Path) -> None:
    task = task_of(tmp_path, FAKE, CLIENT)
    assert graded(task, CLIENT.replace("return self.step", "return 3")) == ("resolved", [])
    assert graded(task, CLIENT.replace("return self.step", "return 4"))[0] == "unresolved"
    program = "def test_pair(n):\n    return n * 2\n"
    files = {
        "solution.py": program,
        "test.py": "import solution\n" + FOUR.replace("f(", "solution.test_pair("),
    }
    row = {"task_id": "a", "files": [{"path": path, "content": text} for path, text in files.items()]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (task,) = Programs(eval=str(tmp_path / "rows.jsonl")).load("eval")
    score = Pytest().examine(task, difference("solution.py", program, program.replace("2", "3")), Process())
    assert score.outcome == "resolved"


SWAPS = {
    "its file": "import pathlib\npathlib.Path('test_b.py').write_text('{empty}')\n",
    "its module's file": "import pathlib\npathlib.Path('cases.py').write_text('{empty}')\n",
    "its module": "import sys, types\nsys.modules['cases'] = types.ModuleType('cases')\n"
    "exec('{empty}', vars(sys.modules['cases']))\n",
    "its method": "import cases\nns = {{}}\nexec('{empty}', ns)\ncases.Mixed = ns['Mixed']\n",
}
EMPTY = "class Mixed:\\n    def test_five(self): pass\\n"
EMPTY_FILE = "import unittest\\nclass Five(unittest.TestCase):\\n    test_five = lambda self: None\\n"


@pytest.mark.parametrize("swap", SWAPS)
def test_a_program_cannot_replace_tests_that_others_inherit(tmp_path: Path, swap: str) -> None:
    task = of_two_files(tmp_path, HEAD + f"from cases import Mixed\n{INHERITS}")
    empty = EMPTY_FILE if swap == "its file" else EMPTY
    assert graded(task, WRONG + SWAPS[swap].format(empty=empty))[0] != "resolved"
    assert graded(task, RIGHT) == ("resolved", [])


def test_a_patch_empties_no_tests_that_its_program_is_needed_for(tmp_path: Path) -> None:
    task = of_two_files(tmp_path, HEAD + f"from mod import g\nfrom cases import Mixed\n{INHERITS}")
    emptied = difference("cases.py", MIXED, "class Mixed: pass\n")
    patch = emptied + difference("mod.py", BROKEN, f"{WRONG}def g(): pass\n")
    score = Pytest().grade(task, patch, Process())
    assert score.outcome == "unresolved"
    assert score.detail.endswith("(put back, since tests are from them: cases.py)")


def of_two_files(folder: Path, other: str) -> Task:
    """Return a task whose second test file inherits its test from a module beside the program."""
    task = task_of(folder, HEAD + FOUR)
    tests = {**task.tests.files, "test_b.py": other}
    plan = msgspec.structs.replace(task.tests, files=tests, command="pytest test.py test_b.py")
    return msgspec.structs.replace(task, files=task.files | tests | {"cases.py": MIXED}, tests=plan)


def test_a_program_that_is_named_as_a_test_may_change_where_others_count(tmp_path: Path) -> None:
    program = "LIMIT = 3\ndef test_pair(n):\n    return n * 2\n"
    task = task_of(
        tmp_path, "from mod import test_pair\ndef test_a():\n    assert test_pair(2) == 6\n", program
    )
    task = msgspec.structs.replace(
        task, tests=msgspec.structs.replace(task.tests, fail_to_pass=["test.py::test_a"])
    )
    assert graded(task, program.replace("* 2", "* 3")) == ("resolved", [])


@pytest.mark.parametrize("more", HARMLESS.values(), ids=HARMLESS.keys())
def test_tests_that_cannot_pass_cost_no_right_program(tmp_path: Path, more: str) -> None:
    task = task_of(tmp_path, HEAD + FOUR + "\n" + more)
    assert graded(task, RIGHT) == ("resolved", [])
    assert graded(task, WRONG.replace("n < 5", "n < 2"))[0] == "unresolved"


SKIPS = "import pytest\ndef f(n):\n    if n > 2: pytest.skip('no')\n    return n * 3\n"
HIDES = """import sys
tests = sys.modules.get("test")
if tests is not None:
    tests.__getattr__ = None
import inspect
for frame in inspect.stack():
    names = frame.frame.f_globals
    if names.get("__name__") == "test":
        class Gone(dict): pass
        names["__test__"] = False
        names["pytestmark"] = []
def f(n): return n * 3 if n < 2 else 0
"""
EXPECTS = """import pytest, sys
def f(n):
    if n > 2: pytest.xfail("known")
    return n * 3
"""


@pytest.mark.parametrize("program", [SKIPS, HIDES, EXPECTS, "import sys\nsys.exit(0)\n"])
def test_a_patch_cannot_skip_or_hide_a_test(tmp_path: Path, program: str) -> None:
    outcome, failed = graded(task_of(tmp_path, HEAD + FOUR), program)
    assert outcome in ("unresolved", "cheated")
    assert failed


ROWS = """
@pytest.mark.parametrize("n, want", [(1, 3), (2, 6), (10**9, 5)])
def test_rows(n, want):
    if n > 10**6:
        pytest.skip("slow")
    assert f(n) == want
"""


def test_a_test_may_skip_some_of_its_rows_by_itself(tmp_path: Path) -> None:
    task = task_of(tmp_path, HEAD + ROWS)
    assert graded(task, RIGHT) == ("resolved", [])
    assert graded(task, RIGHT.replace("3", "(n + 2)"))[1] == ["test.py::test_rows[2-1]"]


def test_a_skipped_row_excuses_no_other_row() -> None:
    text = "@pytest.mark.parametrize('n, want', [(1, 3), (2, 6), (9, 5)])\ndef test_a(n, want):\n"
    files = {"test.py": text + "    assert f(n) == want\n"}
    plan = TestPlan(command="pytest", files=files, fail_to_pass=[], timeout_s=9)
    task = Task(task_id="t", taskset="t", prompt="", image="", workdir="/", tests=plan)
    exam = Exam(task, {}, {"test.py": seal(files["test.py"])})
    names = [f"test.py::test_a[{n}]" for n in range(3)]
    ends = dict(zip(names, ["passed", "passed", "skipped"], strict=True))
    one, other = (
        {names[n]: {cell: [plain(3 * cell + 3)]} for n, cell in cells}
        for cells in ([(0, 0), (1, 1)], [(0, 0), (1, 0)])
    )
    assert exam.passed(TestReport(outcomes=ends, answers=one)) == {*names[:2]}
    assert exam.passed(TestReport(outcomes=ends, answers=other)) == set()
    assert exam.passed(TestReport(outcomes=ends, answers={names[0]: one[names[0]]})) == set()


MANY = {
    "a few values often": "    for n in range(20_000):\n        assert 0 <= f(n % 9) < 25\n",
    "many values": "    for n in range(20_000):\n        assert f(n) >= 0\n",
    "a long value": "    assert 300 in [f(n) for n in range(200_000)]\n",
    "a large number": "    assert f(10**5000) > 10**50\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("body", MANY.values(), ids=MANY.keys())
def test_a_test_may_compare_more_than_a_report_holds(tmp_path: Path, body: str) -> None:
    task = task_of(tmp_path, HEAD + FOUR + "def test_many():\n" + body)
    assert graded(task, RIGHT) == ("resolved", [])
    assert "test.py::test_many" in graded(task, "def f(n):\n    return -1\n")[1]


def test_where_no_test_loads_without_a_repair_its_own_tests_count(tmp_path: Path) -> None:
    task = task_of(tmp_path, HEAD + FOUR + "\n" + UNSEEN["a nested class"], "def g(n):\n    return 0\n")
    assert graded(task, WRONG) == ("unresolved", ["test.py::TestOuter::TestInner::test_five"])
    assert graded(task, RIGHT) == ("resolved", [])


def test_only_what_the_program_itself_computes_opens_an_assertion(tmp_path: Path) -> None:
    tests = "from mod import f\ndef test_a():\n    assert f(1) == (1, 2)\n"
    tests += "def test_b():\n    assert f(0) == (0, 1)\n"
    own = task_of(tmp_path, tests, OWN.format(step=2))
    assert graded(own, OWN.format(step=1)) == ("resolved", [])
    assert graded(own, OWN.format(step=3))[0] == "unresolved"
    assert graded(own, ANY)[0] == "cheated"
    plain = task_of(tmp_path, tests, "def f(n):\n    return (n, n + 2)\n")
    assert graded(plain, ANY)[0] == "unresolved", "no patch opens an assertion"
    seen = Pytest().inspect(plain, difference("mod.py", plain.files["mod.py"], OWN.format(step=1)), Process())
    assert (seen.sealed, seen.assertions, seen.unsealed) == (0, 2, {"test.py": ["3:4", "5:4"]})


@pytest.mark.parametrize(
    "test", ["assert f(1) == f(2) - f(1)", "want = [3]\n    want.append(6)\n    assert [f(1), f(2)] == want"]
)
def test_a_value_that_equals_everything_is_a_cheat_where_nothing_is_sealed(tmp_path: Path, test: str) -> None:
    task = task_of(
        tmp_path, f"from mod import f\ndef test_a():\n    {test}\n", "def f(n):\n    return n * n + 1\n"
    )
    assert graded(task, RIGHT) == ("resolved", [])
    assert graded(task, ANY + "    __sub__ = lambda self, other: self\n")[0] != "resolved"
    program = ANY.replace("def f(n)", "    def __sub__(self, other): return self\ndef f(n)")
    assert graded(task, program)[0] == "cheated"


@pytest.mark.parametrize(
    "helper",
    [
        "def eq(a, b):\n    return a == b\ndef test_a():\n    assert eq(f(1), 3)\n",
        "def test_a():\n    if f(1) != 3:\n        pytest.fail()\n",
    ],
)
def test_a_value_that_equals_everything_is_a_cheat_behind_a_helper(tmp_path: Path, helper: str) -> None:
    task = task_of(tmp_path, HEAD + helper)
    assert graded(task, RIGHT) == ("resolved", [])
    program = ANY.replace("def f(n)", "    __ne__ = lambda self, other: False\ndef f(n)")
    assert graded(task, program)[0] == "cheated"


def test_an_infinite_number_is_near_to_none(tmp_path: Path) -> None:
    tests = "def test_a():\n    assert math.isclose(f(1), 3.5)\n"
    task = task_of(tmp_path, HEAD + "import math\n" + tests)
    assert graded(task, "def f(n):\n    return n + 2.5\n") == ("resolved", [])
    assert graded(task, "def f(n):\n    return float('inf')\n")[0] == "unresolved"


def test_what_the_tests_themselves_do_to_the_process_is_no_cheat(tmp_path: Path) -> None:
    tests = (
        "def test_lines():\n    sys.settrace(lambda *_: None)\n    sys.settrace(None)\n    assert f(1) == 3\n"
    )
    task = task_of(tmp_path, HEAD + FOUR + "\n" + tests)
    assert graded(task, RIGHT) == ("resolved", [])
    assert graded(task_of(tmp_path, HEAD + FOUR), f"import sys\nsys.settrace(None)\n{RIGHT}")[0] == "cheated"


@pytest.mark.slow
def test_answers_of_several_long_loops_fit_into_the_report_together(tmp_path: Path) -> None:
    loop = "    for n in range(3_000):\n        assert 0 <= f(n) < 10**6\n        assert f(1) == 3\n"
    tests = "".join(f"def test_{name}():\n{loop}" for name in "abcdef")
    task = task_of(tmp_path, HEAD + tests)
    assert graded(task, RIGHT) == ("resolved", [])
    assert graded(task, "def f(n):\n    return 3 if n < 2_000 else -1\n")[0] == "unresolved"
    assert graded(task, "def f(n):\n    return n + 1\n")[0] == "unresolved"
