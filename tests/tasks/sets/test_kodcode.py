"""Buggy programs in parquet rows: what becomes a task, and that its tests cannot be talked round."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import ConfigError
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.patch import difference
from hpc_swe.tasks.sets.kodcode import Kodcode
from hpc_swe.tasks.visible_tests import cut, ids_of_tests

STATEMENT = "Find the bug."
WRONG = "def double(x):\n    return x + 2\n"
RIGHT = "def double(x):\n    return x * 2\n"
TESTS = """from double_code import double

def test_small():
    assert double(3) == 6

class TestLarge:
    def test_ten(self):
        assert double(10) == 20
"""


def row(name: str, tests: str = TESTS) -> dict[str, object]:
    files = [{"content": tests, "path": "test.py"}, {"content": WRONG, "path": "double_code.py"}]
    extra = {"entrypoint": "python -m pytest --tb=no -s test.py", "files": files, "task_name": name}
    prompt = '[{"role": "user", "content": "Find the bug."}]'
    return {"task_id": name, "problem_statement": STATEMENT, "prompt": prompt, "extra_info": extra}


@pytest.fixture
def taskset(tmp_path: Path) -> Kodcode:
    for split in ("train", "eval"):
        rows = [row(f"{split}-{number}") for number in range(3)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
    return Kodcode(train=str(tmp_path / "train.parquet"), eval=str(tmp_path / "eval.parquet"))


def test_a_row_becomes_a_task_in_the_order_of_the_file(taskset: Kodcode) -> None:
    found = list(taskset.load("train"))
    assert [task.task_id for task in found] == ["train-0", "train-1", "train-2"]
    assert [task.task_id for task in taskset.load("eval")] == ["eval-0", "eval-1", "eval-2"]
    [task, *_] = found
    assert task.prompt == f"{STATEMENT}\n\nFiles: double_code.py, test.py"
    assert set(task.files) == {"test.py", "double_code.py"}
    assert task.tests.command == "python -m pytest --tb=short -sq test.py"
    assert task.tests.files == {"test.py": TESTS}
    assert task.tests.fail_to_pass == [], "all tests count that pytest collects"


@pytest.mark.parametrize(
    ("first_message", "said"),
    [("statement", STATEMENT), ("directory_tree", "The files of the program:\n  double_code.py\n  test.py")],
)
def test_the_first_message_says_what_is_configured(taskset: Kodcode, first_message: str, said: str) -> None:
    task = next(iter(Kodcode(train=taskset.train, first_message=first_message).load("train")))
    assert task.prompt == said


def test_an_entrypoint_names_the_tests_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    files = [{"path": "checks/test_it.py", "content": TESTS}, {"path": "double_code.py", "content": WRONG}]
    extra = {"entrypoint": "python -m pytest --tb=no -s checks/test_it.py", "files": files}
    pq.write_table(pa.Table.from_pylist([row("a") | {"extra_info": extra}]), path)
    (task,) = Kodcode(train=str(path)).load("train")
    assert task.tests.command == "python -m pytest --tb=short -sq checks/test_it.py"
    assert list(task.tests.files) == ["checks/test_it.py"]
    extra["entrypoint"] = "python main.py"
    pq.write_table(pa.Table.from_pylist([row("a") | {"extra_info": extra}]), path)
    with pytest.raises(ConfigError, match=r"row 1: a: entrypoint 'python main.py' does not run pytest"):
        list(Kodcode(train=str(path)).load("train"))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("async def test_a(): pass", ["test.py::test_a"]),
        (
            "import unittest as u\nclass Odd(u.TestCase):\n    def test_a(self): pass",
            ["test.py::Odd::test_a"],
        ),
        ("def test_a(): 0\ndef test_a(): 1", ["test.py::test_a"]),
        ("class Helper:\n    def test_a(self): pass\ndef helper(): pass", []),
        ("import pytest\n@pytest.mark.parametrize('x', [1])\ndef test_a(x): pass", ["test.py::test_a"]),
        (
            "class TestA:\n    class TestB:\n        async def test_a(self): 0",
            ["test.py::TestA::TestB::test_a"],
        ),
        ("import pytest\n@pytest.fixture\ndef test_data(): pass", []),
        ("def test_a(: pass", []),
    ],
)
def test_ids_are_those_that_pytest_is_sure_to_find(text: str, ids: list[str]) -> None:
    assert ids_of_tests(text) == ids


def test_a_row_without_tests_that_have_names_is_passed_over_and_said(tmp_path: Path, caplog) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row("a", "x = 1\n"), row("b")]), path)
    assert [task.task_id for task in Kodcode(train=str(path)).load("train")] == ["b"]
    assert "skipped 1 rows of train" in caplog.text


def test_only_the_right_program_is_paid_and_its_own_tests_do_not_count(taskset: Kodcode) -> None:
    [task, *_] = taskset.load("train")

    def reward(**files: str) -> float | None:
        parts = [difference(path, task.files.get(path), text) for path, text in files.items()]
        return Pytest().grade(task, "".join(parts), Process()).reward

    assert reward(**{"double_code.py": RIGHT}) == 1.0
    assert reward(**{"double_code.py": WRONG + "\n"}) == 0.0
    assert reward(**{"test.py": "def test_small():\n    pass\n"}) == 0.0
    assert reward(**{"double_code.py": RIGHT, "test.py": "def test_small():\n    assert False\n"}) == 1.0


def test_half_of_the_tests_are_hidden_and_always_the_same(tmp_path: Path, caplog) -> None:
    tests = (f"@mark\ndef test_{n}():\n    x = (1,\n2)\n    assert {n}\n\n" for n in range(7))
    many = "X = 1\n\n" + "".join(tests)
    rows = [row("a", many), row("b", many), row("one", "def test_only():\n    assert f() == 1\n")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    tasks, again, shown = (
        list(Kodcode(train=str(tmp_path / "rows.parquet"), hidden=hidden).load("train"))
        for hidden in (0.5, 0.5, 0.0)
    )
    assert tasks == again
    seen = [ids_of_tests(task.files["test.py"]) for task in tasks]
    assert [len(names) for names in seen] == [4, 4, 1]
    assert seen[0] != seen[1]
    assert all("X = 1" in task.files["test.py"] for task in tasks[:2])
    assert all(task.files["test.py"] == task.tests.files["test.py"] for task in shown)
    assert "1 tasks of train show all of their tests" in caplog.text


A, C, D = "def test_a():\n    0\n", "    def test_c(self): pass\n", "    @x\n    def test_d(self): pass\n"


@pytest.mark.parametrize(
    ("hidden", "left"),
    [
        ({"test_a"}, f"class TestB:\n{C}{D}"),
        ({"TestB.test_d"}, f"{A}class TestB:\n{C}"),
        ({"TestB.test_c", "TestB.test_d"}, f"{A}class TestB:\n    pass\n"),
    ],
)
def test_hidden_tests_are_cut_out_of_the_text(hidden: set[str], left: str) -> None:
    assert cut(f"{A}class TestB:\n{C}{D}", hidden) == left


def test_what_is_no_file_of_rows_is_one_error_that_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[taskset\] train = '.*absent': no such file"):
        list(Kodcode(train=str(tmp_path / "absent")).load("train"))
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"task_id": ["a"]}), other)
    with pytest.raises(ConfigError, match=r"\[taskset\] eval = '.*other.parquet'.*published set"):
        list(Kodcode(eval=str(other)).load("eval"))
    other.write_text("no parquet")
    with pytest.raises(ConfigError, match=r"\[taskset\] eval"):
        list(Kodcode(eval=str(other)).load("eval"))
