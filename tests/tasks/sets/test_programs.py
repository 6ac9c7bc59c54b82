"""Buggy programs in folders and rows: what becomes a task, and that a repair of all of them is paid."""

import json
from pathlib import Path

import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import ConfigError
from hpc_swe.config.settings import TasksConfig
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.patch import difference
from hpc_swe.tasks.sets._exercises import with_names
from hpc_swe.tasks.sets.programs import Programs
from hpc_swe.tasks.visible_tests import ids_of_tests

WRONG, RIGHT = "def half(x):\n    return x // 3\n", "def half(x):\n    return x // 2\n"
TESTS = """import unittest

from half_code import half


class TestHalf(unittest.TestCase):
    def test_four(self):
        self.assertEqual(half(4), 2)

    def test_nine(self):
        self.assertEqual(half(9), 4)
"""


def folder(root: Path, name: str, **files: str) -> Path:
    for path, text in ({"test.py": TESTS, "half_code.py": WRONG} | files).items():
        (root / name / path).parent.mkdir(parents=True, exist_ok=True)
        (root / name / path).write_text(text)
    return root


def test_a_folder_of_programs_is_loaded_with_its_repairs(tmp_path: Path) -> None:
    folder(
        tmp_path, "one", **{".fixed/half_code.py": RIGHT, ".debugreadonly": "test.py\n", "data/n.txt": "4"}
    )
    folder(tmp_path, "two", **{"__pycache__/half_code.pyc": "x"})
    (tmp_path / "one/image.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "README.md").write_text("Programs.\n")
    programs = Programs(train=str(tmp_path))
    one, two = programs.load("train")
    assert sorted(one.files) == [".debugreadonly", "data/n.txt", "half_code.py", "test.py"]
    assert sorted(two.files) == ["half_code.py", "test.py"]
    assert one.prompt.endswith("\n\nFiles: data/n.txt, half_code.py, test.py")
    assert len(ids_of_tests(one.files["test.py"])) == 1, "half of the tests are hidden"
    references = programs.references([one, two])
    assert list(references) == ["one"]
    assert Pytest().grade(one, references["one"], Process()).reward == 1.0
    assert Pytest().examine(one, "", Process()).reward == 0.0


def test_a_single_test_of_assertions_is_divided_and_half_hidden(tmp_path: Path) -> None:
    """Or a table of the visible answers would be paid."""
    head = "from solution import *\nLIMIT = 3\n"
    test = f"{head}def test_base():\n    assert f(1) == 2\n    assert f(LIMIT) == 6\n    assert f(\n4) == 8\n"
    files = [
        {"path": "test.py", "content": test},
        {"path": "solution.py", "content": "def f(x):\n    return 2\n"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"task_id": "a", "files": files}) + "\n")
    (task,) = Programs(train=str(path)).load("train")
    assert ids_of_tests(task.tests.files["test.py"]) == [f"test.py::test_base_{n}" for n in range(3)]
    assert len(ids_of_tests(task.files["test.py"])) == 2
    assert task.files["test.py"].partition("\n")[2].startswith("LIMIT = 3\ndef test_base")
    compile(task.tests.files["test.py"], "test.py", "exec")


LARGE = """from __future__ import annotations
import os.path
from typing import *
from math import floor as down
from helper import *
try:
    from fast import quick
except ImportError:
    quick = None
LIMIT, result = 3, 4
def f(x): return x
def sorted(x): return x
"""


@pytest.mark.parametrize(
    ("program", "test", "imports", "own"),
    [
        ("def f(): 0\n", "assert all([f()])", "", ["all"]),
        ("def f(: 0\n", "assert all([f()])", "", ["all", "f"]),
        (LARGE, "x: List = sorted([f(LIMIT)])", "from typing import *; ", ["List"]),
        (LARGE, "result = down(g())", "from typing import *; from math import floor as down; ", ["down"]),
    ],
)
def test_tests_keep_what_a_program_does_not_define(
    program: str, test: str, imports: str, own: list[str]
) -> None:
    files = {"solution.py": program, "helper.py": "from solution import *\ndef g(): return 1\n"}
    text = with_names(f"from solution import *\nfrom os import *\ndef test_a():\n    {test}\n", files)
    assert text.startswith(f"{imports}import builtins as _python, solution as _program; ")
    assert f"_own.intersection_update({own})" in text.splitlines()[0]


STUB = "def f(n):\n    return 0\n"
SKIPPED = "@pytest.mark.skip(reason='slow')\ndef test_b():\n    assert f(9) == 10\n"


@pytest.mark.parametrize(
    ("program", "added", "check"),
    [
        ("", "f", "len([f(1)]) == f(0)"),
        (STUB, "g", "len([g(1)]) == g(0)"),
        (STUB, "f", "globals()['f'](1) == len('ab')"),
        (STUB, "f", "eval('f(1)') == len('ab')"),
        ("__all__ = ['_f']\n_f = abs\n", "_f", "_f(1) == len('ab')"),
    ],
)
def test_tests_get_all_that_a_patch_writes(tmp_path: Path, program: str, added: str, check: str) -> None:
    """The asked function may be missing at first, and tests may look it up while they run."""
    test = f"import pytest\nfrom solution import *\ndef test_a():\n    assert {check}\n\n{SKIPPED}"
    repaired = f"{program}def {added}(n):\n    return n + 1\n"
    replaced = "def len(x):\n    return 0\ndef globals():\n    return {}\n"
    crowded = f"{program}{replaced}def {added}(n):\n    return 0\n"
    files = {"solution.py": program, "test.py": test}
    row = {"task_id": "a", "files": [{"path": path, "content": text} for path, text in files.items()]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (task,) = Programs(eval=str(tmp_path / "rows.jsonl")).load("eval")
    right, wrong = (difference("solution.py", program, text) for text in (repaired, crowded))
    assert Pytest().grade(task, right, Process()).outcome == "resolved"
    assert Pytest().grade(task, wrong, Process()).outcome == "unresolved"


LYING = """
class Name(str):
    asked = 0
    def __hash__(self):
        Name.asked += 1
        return 7 if Name.asked == 1 else hash(str(self))
    def __eq__(self, other):
        return str(self) == str(other)
def sorted(x):
    return [1, 2]
__all__ = ["f", Name("sorted")]
"""


def test_a_name_whose_hash_lies_brings_no_name_of_python(tmp_path: Path) -> None:
    test = "from solution import *\ndef test_a():\n    assert sorted(f(0)) == [1, 2]\n"
    files = [{"path": "solution.py", "content": STUB}, {"path": "test.py", "content": test}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"task_id": "a", "files": files}) + "\n")
    (task,) = Programs(eval=str(tmp_path / "rows.jsonl")).load("eval")
    for program, outcome in ((STUB + LYING, "unresolved"), (STUB.replace("0", "[2, 1]"), "resolved")):
        assert Pytest().grade(task, difference("solution.py", STUB, program), Process()).outcome == outcome


def test_ids_in_a_row_are_kept_and_hidden_by_their_functions(tmp_path: Path) -> None:
    test = (
        "import pytest\n\n\n@pytest.mark.parametrize('x', [1, 2])\ndef test_many(x):\n    assert x\n\n\n"
        "def test_one():\n    assert False\n"
    )
    row = {
        "task_id": "a",
        "files": [{"path": "test.py", "content": test}],
        "fail_to_pass": ["test.py::test_one"],
    }
    row["pass_to_pass"] = ["test.py::test_many[1]", "test.py::test_many[2]"]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (task,) = Programs(train=str(tmp_path / "rows.jsonl")).load("train")
    assert (task.tests.fail_to_pass, task.tests.pass_to_pass) == (row["fail_to_pass"], row["pass_to_pass"])
    assert ("test_many" in task.files["test.py"]) != ("test_one" in task.files["test.py"])
    full = row | {
        "tests": row["files"],
        "files": [{"path": "test.py", "content": ""}],
        "absent": ["/usr/lib/x*"],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(full) + "\n")
    (task,) = Programs(train=str(tmp_path / "rows.jsonl")).load("train")
    assert (task.files["test.py"], task.tests.files["test.py"], task.absent) == ("", test, ["/usr/lib/x*"])


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"task_id": "a"}', "rows.jsonl:1: a: needs extra_info.files, files or buggy_solution"),
        ('{"files": []}', "rows.jsonl:1: .*task_id"),
        ("{", "rows.jsonl:1: "),
        ('{"task_id": "a", "buggy_solution": "x", "test": "x = 1"}', "no function check"),
        (
            '{"task_id": "a", "files": [{"path": "test.py", "content": "def f(:"}], "fail_to_pass": ["b"]}',
            "rows.jsonl:1: invalid syntax",
        ),
        ('{"task_id": " ", "files": [{"path": "test.py", "content": ""}]}', "task_id is empty"),
        ('{"task_id": "a", "files": [{"path": "../x.py", "content": ""}]}', "below the work directory"),
        ('{"task_id": "a", "files": [{"path": "/etc/x", "content": ""}]}', "below the work directory"),
        ('{"task_id": "a", "files": [{"path": "a\\u0000b", "content": ""}]}', "below the work directory"),
        (
            '{"task_id": "a", "files": [{"path": "x", "content": ""}, {"path": "x", "content": "1"}]}',
            "'x' occurs twice",
        ),
        ('{"task_id": "a", "files": null, "extra_info": null}', "needs extra_info.files"),
        (
            json.dumps({"task_id": "a", "buggy_solution": "x", "test": "x = " + "(" * 9000}),
            "too many nested|nested too deeply",
        ),
    ],
)
def test_a_bad_row_is_one_error_that_names_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=complaint) as caught:
        list(Programs(eval=str(tmp_path / "rows.jsonl")).load("eval"))
    assert str(caught.value).startswith(f"[taskset] eval = '{tmp_path}/rows.jsonl': ")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no folder in it holds a test.py"):
        list(Programs(eval=str(tmp_path / "empty")).load("eval"))


@pytest.mark.parametrize("content", [b"#" * 1_000_001, b"# caf\xe9\n"])
def test_tests_that_cannot_be_part_of_a_task_are_one_clear_error(tmp_path: Path, content: bytes) -> None:
    folder(tmp_path, "one")
    (tmp_path / "one/test.py").write_bytes(content)
    with pytest.raises(ConfigError, match=r"one/test\.py: it has more than 1000000 bytes or is not UTF-8"):
        list(Programs(train=str(tmp_path)).load("train"))


def test_tests_that_are_nested_too_deeply_for_a_grader_are_refused(tmp_path: Path) -> None:
    deep = "def test_a():\n    assert f() == " + " + ".join(["1"] * 400) + "\n"
    folder(tmp_path / "folders", "one", **{"test.py": deep})
    files = [{"path": "test.py", "content": deep}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"task_id": "a", "files": files}) + "\n")
    for source in (tmp_path / "folders", tmp_path / "rows.jsonl"):
        with pytest.raises(ConfigError, match="it is nested too deeply: 40. levels, of 150"):
            list(Programs(train=str(source)).load("train"))


def test_two_different_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    """A worker looks a task up by its name, and would train on the held-out one."""
    folder(tmp_path / "train", "half")
    folder(tmp_path / "eval", "half", **{"half_code.py": RIGHT})
    folder(tmp_path / "eval", "other")
    take = TasksConfig(train=1, eval=2).take
    with pytest.raises(ConfigError, match="another held-out task are both called 'half'"):
        take(Programs(train=str(tmp_path / "train"), eval=str(tmp_path / "eval")))
    same = take(Programs(train=str(tmp_path / "train"), eval=str(tmp_path / "train")))
    assert same["train"] == same["eval"]
