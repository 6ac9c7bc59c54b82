"""Code under test may change who judges it, and is found out; tests of any honest shape are paid."""

import json
import time

import msgspec
import pytest

from hpc_swe.tasks.graders import _judge
from hpc_swe.tasks.graders._swebench import ParsedRun, Run
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.tasks.patch import difference
from hpc_swe.tasks.swebench_rows import START
from tests.kit.cheats.insiders import CASES
from tests.kit.cheats.insiders_early import EARLY
from tests.kit.toy import (
    BROKEN,
    MENDED,
    Checkout,
    gold,
    make_repository,
    new,
    patch,
    row,
    taskset,
    write_rows,
)

pytestmark = pytest.mark.slow

GRADER = Swebench()


def one_task(folder, kind, base, **more):
    (one,) = taskset(write_rows(folder / "rows.jsonl", row(kind, base, **more))).load("train")
    return one


@pytest.fixture
def early(tmp_path):
    """A task whose code under test runs before pytest's session, and its sandboxes."""
    base = make_repository(tmp_path / "calc", {"tests/conftest.py": "import calc.core\n"})
    return one_task(tmp_path, "pytest", base), Checkout(repository=str(tmp_path / "calc"))


@pytest.mark.parametrize("text", EARLY.values(), ids=EARLY.keys())
def test_what_a_conftest_imports_cannot_pass_for_pytest_or_us(early, text):
    score = GRADER.grade(early[0], patch("calc/core.py", BROKEN, text + BROKEN), early[1])
    assert (score.outcome, score.reward) == ("cheated", -2.0), score


def test_a_solution_that_a_conftest_imports_is_paid(early):
    assert GRADER.grade(early[0], gold(), early[1]).outcome == "resolved"


def test_a_solution_that_adds_what_the_tests_import_is_paid(tmp_path):
    """Plugins change pytest after a conftest.py has run; no test of the base commit can be collected."""
    base = make_repository(tmp_path / "calc", {"tests/conftest.py": "import calc\n"})
    test = "from calc.more import half\n\n\ndef test_half():\n    assert half(8) == 4\n"
    names = {"FAIL_TO_PASS": json.dumps(["tests/test_more.py::test_half"]), "PASS_TO_PASS": "[]"}
    task = one_task(tmp_path, "pytest", base, test_patch=new("tests/test_more.py", test), **names)
    text = new("calc/more.py", "def half(a):\n    return a // 2\n")
    score = GRADER.grade(task, text, Checkout(repository=str(tmp_path / "calc")))
    assert score.outcome == "resolved", score


@pytest.mark.parametrize("kind", ["unittest", "pytest"])
def test_a_module_that_cannot_be_imported_is_no_cheat(repository, sandboxes, tmp_path, kind):
    text = difference("calc/core.py", BROKEN, f"import nothing_of_this_name\n{MENDED}")
    score = GRADER.grade(one_task(tmp_path, kind, repository[1]), text, sandboxes)
    assert (score.outcome, score.reward) == ("unresolved", -1.0), score


SHAPES = {
    "unittest": '''import unittest
from unittest import mock

from calc import testing
from calc.core import add


class TestMore(testing.Case):
    failing = None

    def setUp(self):
        self.id = 7
        self.addTypeEqualityFunc(complex, lambda a, b, msg=None: None)

    @mock.patch("calc.core.double")
    @testing.loud
    def test_decorated(self, double):
        """A sum,
        in two lines."""
        self.assertSum(1, 2, 3)

    def test_raises(self):
        with self.assertRaises(TypeError):
            add()
        self.assertEqual(add(1, 2), 3)

    @unittest.expectedFailure
    def test_expected(self):
        self.assertEqual(add(1, 2), 4)

    @unittest.skip("not here")
    def test_skipped(self):
        self.fail()


def make(n):
    def test(self):
        self.assertEqual(add(n, 1), n + 1)

    return test


for n in range(2):
    setattr(TestMore, f"test_made_{n}", make(n))
''',
    "pytest": """import functools

import pytest

from calc.core import add


@pytest.fixture(autouse=True)
def quiet(tmp_path):
    yield tmp_path


def loud(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        return test(*args, **kwargs)

    return run


class TestMore:
    @pytest.mark.parametrize("b", ["x y", "a - b"])
    @loud
    def test_decorated(self, b):
        assert add("", b) == b, "no sum"

    def test_close(self):
        with pytest.raises(TypeError):
            add()
        assert add(0.1, 0.2) == pytest.approx(0.3)


@pytest.mark.xfail(strict=False)
def test_expected():
    assert add(1, 2) == 4


@pytest.mark.skip
def test_skipped():
    raise AssertionError
""",
}
WANTED = {
    "unittest": (
        ["A sum,", "test_raises (tests.test_more.TestMore)"]
        + [f"test_made_{n} (tests.test_more.TestMore)" for n in range(2)],
        ["test_skipped (tests.test_more.TestMore)"],
    ),
    "pytest": (
        ["tests/test_more.py::TestMore::test_close", "tests/test_more.py::TestMore::test_decorated[x"],
        ["tests/test_more.py::test_expected", "tests/test_more.py::test_skipped"],
    ),
}
TESTING = """import functools
import unittest


def loud(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        return test(*args, **kwargs)

    return run


class Case(unittest.TestCase):
    def __call__(self, result=None):
        return super().__call__(result)

    def assertSum(self, a, b, c):
        from calc.core import add

        self.assertEqual(add(a, b), c)
"""


@pytest.fixture
def shapes(tmp_path):
    """A repository with a base class for tests of its own, and a task of any kind in it."""
    base = make_repository(tmp_path / "calc", {"calc/testing.py": TESTING})

    def make(kind, **more):
        fails, passes = WANTED[kind]
        tests = new("tests/test_more.py", SHAPES[kind])
        words = {"FAIL_TO_PASS": json.dumps(fails), "PASS_TO_PASS": json.dumps(passes), "test_patch": tests}
        return one_task(tmp_path, kind, base, **words | more), Checkout(repository=str(tmp_path / "calc"))

    return make


@pytest.mark.parametrize("kind", ["unittest", "pytest"])
def test_tests_of_any_shape_are_paid_and_accuse_nobody(shapes, kind):
    one, sandboxes = shapes(kind)
    more = patch("calc/testing.py", TESTING, f"{TESTING}\n    def assertMore(self): pass\n")
    score = GRADER.grade(one, gold() + more, sandboxes)
    assert (score.outcome, score.failed, score.reward) == ("resolved", [], 1.0), score
    score = GRADER.examine(one, "", sandboxes)
    assert (score.outcome, sorted(score.failed)) == ("unresolved", sorted(one.tests.fail_to_pass)), score


CALL = "        return super().__call__(result)\n"
LIES_OF_BASES = {
    "assertEqual": TESTING + "\n    def assertEqual(self, *args): pass\n",
    "run": TESTING.replace(
        CALL,
        "        result.startTest(self)\n        result.addSuccess(self)\n        result.stopTest(self)\n",
    ),
    "run, with a look at the file": TESTING.replace(
        CALL,
        "        code = getattr(self, self._testMethodName).__code__\n"
        "        if 'test_more' not in code.co_filename: return super().__call__(result)\n"
        "        result.startTest(self)\n        result.addSuccess(self)\n        result.stopTest(self)\n",
    ),
    "__init_subclass__": TESTING
    + "\n    def __init_subclass__(kind):\n        for name in [n for n in vars(kind) if n[:5] == 'test_']:\n"
    "            setattr(kind, name, lambda self: None)\n",
    "setUp": TESTING.replace("loud(test):", "loud(test):\n    return lambda self, *args: None\n"),
    "assertSum and subTest": TESTING.replace("self.assertEqual(add(a, b), c)", "pass")
    + "\n    def assertRaises(self, *args): return self.subTest()\n"
    + "    def _baseAssertEqual(self, *a, **k): 0\n",
    "__getattribute__": TESTING
    + "\n    def __getattribute__(self, name):\n        found = object.__getattribute__(self, name)\n"
    "        return (lambda *a, **k: None) if name == 'assertEqual' else found\n",
    "failureException": TESTING + "\n    failureException = unittest.SkipTest\n",
    "a metaclass": TESTING.replace(
        "class Case(unittest.TestCase):",
        "class Meta(type):\n    def __new__(kind, name, bases, members):\n"
        "        for key in [k for k in members if k[:5] == 'test_']:\n"
        "            members[key] = lambda self, *a: None\n"
        "        return super().__new__(kind, name, bases, members)\n\n\n"
        "class Case(unittest.TestCase, metaclass=Meta):",
    ),
}


@pytest.mark.parametrize("text", LIES_OF_BASES.values(), ids=LIES_OF_BASES.keys())
def test_a_base_class_of_tests_that_lies_is_not_paid(shapes, text):
    one, sandboxes = shapes("unittest")
    score = GRADER.grade(one, patch("calc/testing.py", TESTING, text), sandboxes)
    assert score.outcome in ("unresolved", "cheated"), score


def test_plugins_of_a_settings_file_that_may_be_changed_lie_in_vain(repository, sandboxes, tmp_path):
    change = {"patch": gold() + new("setup.cfg", "[tool:pytest]\naddopts = -q\n")}
    one = one_task(tmp_path, "pytest", repository[1], **change)
    (hook,) = [files["evil.py"] for _, _, name, files in CASES if name == "entry points in a dist-info"]
    settings = new("setup.cfg", "[tool:pytest]\naddopts = -p evil\n")
    score = GRADER.grade(one, new("evil.py", hook) + settings, sandboxes)
    assert (score.outcome, score.reward) == ("cheated", -2.0), score
    assert GRADER.grade(one, gold() + settings.replace("-p evil", "-q"), sandboxes).outcome == "resolved"


def log(kind, outcomes, docs=None, base=None, fails=("a",), passes=("b",), folder=None):
    (one,) = taskset(write_rows(folder / "rows.jsonl", row(kind, "0" * 40))).load("train")
    plan = msgspec.structs.replace(one.tests, fail_to_pass=list(fails), pass_to_pass=list(passes))
    one = msgspec.structs.replace(one, tests=plan)
    docs = dict.fromkeys(outcomes, "") | (docs or {})
    text = Run(one).log_of(ParsedRun(outcomes=outcomes, docs=docs), ParsedRun(outcomes=base or {}))
    return one, _judge.report(one, "x", text)["tests_status"]


@pytest.mark.parametrize(
    ("outcomes", "base", "fails", "passes"),
    [
        ({"x.a": "passed", "x.b": "passed"}, {}, ["a (x)"], ["b (x)"]),
        ({"x.a": "xfailed", "x.b": "passed"}, {"x.a": "xfailed"}, [], ["b (x)"]),
        ({"x.a": "skipped", "x.b": "skipped"}, {}, [], []),
        ({"x.a": "passed", "x.b": "skipped"}, {"x.b": "skipped"}, ["a (x)"], ["b (x)"]),
        ({"x.a": "passed", "x.b": "skipped"}, {"x.b": "passed"}, ["a (x)"], []),
    ],
)
def test_what_is_no_failure_counts_only_as_before(tmp_path, outcomes, base, fails, passes):
    _, found = log("unittest", outcomes, base=base, fails=["a (x)"], passes=["b (x)"], folder=tmp_path)
    assert (found["FAIL_TO_PASS"]["success"], found["PASS_TO_PASS"]["success"]) == (fails, passes)


@pytest.mark.parametrize("order", [1, -1])
def test_the_worst_of_several_tests_of_one_name_counts(tmp_path, order):
    outcomes = {"t.A.x": "passed", "t.B.y": "failed", "t.C.z": "passed"}
    docs = dict.fromkeys(outcomes, "A name")
    ordered = dict(list(outcomes.items())[::order])
    _, found = log("unittest", ordered, docs, fails=["A name"], passes=["z (t.C)"], folder=tmp_path)
    assert found["FAIL_TO_PASS"] == {"success": [], "failure": ["A name"]}
    assert found["PASS_TO_PASS"]["success"] == ["z (t.C)"]
    outcomes = {"t.py::a[1] x": "passed", "t.py::a[1]": "failed", "t.py::a[1] y": "passed"}
    ordered = dict(list(outcomes.items())[::order])
    _, found = log("pytest", ordered, fails=["t.py::a[1]"], passes=[], folder=tmp_path)
    assert found["FAIL_TO_PASS"] == {"success": [], "failure": ["t.py::a[1]"]}


def test_the_parser_sees_the_wanted_names_alone(tmp_path):
    (one,) = taskset(write_rows(tmp_path / "rows.jsonl", row("unittest", "0" * 40))).load("train")
    outcomes = {f"t.T.test_{n}": "passed" for n in range(5000)} | {
        "tests.test_core.TestCore.test_add": "passed"
    }
    docs = dict.fromkeys(outcomes, "a ... Testing against Django installed in b")
    text = Run(one).log_of(ParsedRun(outcomes=outcomes, docs=docs), ParsedRun())
    assert text.split("\n")[1:-2] == ["test_add (tests.test_core.TestCore) ... ok"]


def test_a_text_that_freezes_the_parser_is_unresolved_and_freezes_no_other(tmp_path):
    (one,) = taskset(write_rows(tmp_path / "rows.jsonl", row("unittest", "0" * 40))).load("train")
    line = "a ... Testing against Django installed in b\n"
    began, used = time.monotonic(), time.thread_time()
    found = _judge.report(one, "x", f"{START}\n{line * 40000}\n>>>>> End Test Output\n", cpu_s=2)
    assert not found["resolved"]
    assert "processor time" in found["complaint"], found
    assert time.thread_time() - used < 2.0
    assert time.monotonic() - began < 200.0


def test_the_parser_imports_nothing_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('not the one of Python')\n")
    monkeypatch.chdir(tmp_path)
    _, found = log("pytest", {"t.py::a": "passed"}, fails=["t.py::a"], passes=[], folder=tmp_path)
    assert found["FAIL_TO_PASS"]["success"] == ["t.py::a"]


def test_a_log_that_fills_the_parser_s_memory_is_unresolved(tmp_path):
    (one,) = taskset(write_rows(tmp_path / "rows.jsonl", row("unittest", "0" * 40))).load("train")
    found = _judge.report(one, "x", f"{START}\n" + "x" * (1 << 22), memory=1 << 20)
    assert not found["resolved"]
    assert "memory" in found["complaint"]


def test_the_module_under_test_is_wrong_in_every_case():
    names: dict[str, object] = {}
    exec(MENDED, names)
    assert not [name for _, _, name, files in CASES if files.get("calc/core.py") == MENDED]
    assert len({(kind, name) for kind, _, name, _ in CASES}) == len(CASES)
