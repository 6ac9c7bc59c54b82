"""Published sets in their own columns: what becomes a task, what is paid, and what is refused."""

import json
import pickle
from base64 import b64encode
from pathlib import Path
from typing import Any
from zlib import compress

import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Score, Task
from hpc_swe.tasks import patch
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.sets.programs import Programs
from hpc_swe.tasks.visible_tests import ids_of_tests
from tests.kit.published import (
    CALLS,
    ROWS,
    SUM,
    SUMS,
    acecode,
    cases,
    humaneval,
    kodcode,
    live_code_bench,
    mbpp,
    taco,
)


def programs(folder: Path, *rows: dict[str, Any], timeout_s: float = 60.0) -> Programs:
    (folder / "rows.json").write_text(json.dumps(rows))
    return Programs(train=str(folder / "rows.json"), timeout_s=timeout_s)


def load(folder: Path, row: dict[str, Any]) -> Task:
    (task,) = programs(folder, row).load("train")
    return task


def graded(task: Task, solution: str) -> Score:
    """Grade a program in place of the task's."""
    return Pytest().grade(
        task, patch.difference("solution.py", task.files["solution.py"], solution), Process()
    )


@pytest.mark.parametrize("name", ROWS)
def test_a_right_program_alone_is_paid_for_a_row_of(name: str, tmp_path: Path) -> None:
    row, right = ROWS[name]
    known = programs(tmp_path, row)
    (task,) = known.load("train")
    assert graded(task, right).outcome == "resolved"
    assert Pytest().examine(task, "", Process()).outcome == "unresolved"
    assert all(Pytest().grade(task, one, Process()).reward == 1 for one in known.references([task]).values())
    found = Pytest().inspect(task, None, Process())
    assert 0 < found.assertions == found.sealed, "every expected value stays outside"
    shown, judged = (ids_of_tests(one["test.py"]) for one in (task.files, task.tests.files))
    assert 0 < len(shown) <= len(judged) / 2
    statement = row.get("question") or row.get("text") or row.get("prompt") or row.get("question_content")
    assert (statement or row["description"]).strip() in task.prompt + task.files["solution.py"]


def test_the_agent_sees_signatures_and_no_body_of_the_solution(tmp_path: Path) -> None:
    solution = (
        "import math\n\nSECRET = 5\n\n\nclass Box:\n    def __init__(self, size: math.Any = SECRET):\n"
        "        self.size = 1\n\n    def grow(self, by):\n        return SECRET\n"
    )
    test = "import solution\nfrom solution import Box\n\ndef test_a():\n    assert Box(1).grow(2) == 5\n"
    text = load(tmp_path, kodcode() | {"solution": solution, "test": test}).files["solution.py"]
    assert "def grow(self, by):\n        raise NotImplementedError" in text
    assert "return SECRET" not in text


def test_visible_answers_by_heart_are_not_paid(tmp_path: Path) -> None:
    task = load(tmp_path, taco())
    known = {f"{n} 2": n + 2 for n in range(6) if f"output('{n} 2\\n')" in task.files["test.py"]}
    assert len(known) == 3
    assert graded(task, f"print({known!r}.get(input(), 0))\n").outcome == "unresolved"


SIZES = [f"assert len(pair({n})) == len(range({n}, {n + 2}))" for n in range(4)]
PAIR = "def pair(n):\n    return [n, n + 1]\n"
COUNTS = [f"assert Counter(words({text!r})) == Counter({text.split()!r})" for text in ("a", "b a", "", "c c")]
WORDS = "from collections import Counter\n\n\ndef words(text):\n    return text.split()\n"
ROOT = "import math\n\n\ndef at(x):\n    return x * x - 2\n\n\ndef root():\n"
CROWDED: dict[str, tuple[dict[str, Any], str, str]] = {
    "MBPP": (mbpp() | {"code": PAIR, "test_list": SIZES}, PAIR, "def pair(n): 0\ndef len(x): return 0\n"),
    "AceCode": (
        acecode()
        | {"inferences": [{"completion": f"```python\n{WORDS}```", "pass_rate": 1}], "test_cases": COUNTS},
        WORDS,
        "def words(text): 0\ndef Counter(x): return 0\n",
    ),
    "AceCode without a reference": (
        acecode() | {"inferences": [], "test_cases": COUNTS},
        WORDS.partition("\n\n\n")[2],
        "def words(text): 0\ndef Counter(x): return 0\n",
    ),
    "KodCode": (
        kodcode()
        | {
            "solution": PAIR,
            "test": "from solution import *\n"
            + "".join(f"def test_{n}(): {one}\n" for n, one in enumerate(SIZES)),
        },
        PAIR,
        "def pair(n): 0\ndef len(x): return 0\n",
    ),
    "rows of files": (
        {
            "task_id": "pair",
            "files": [
                {"path": "solution.py", "content": "def pair(n):\n    return [n]\n"},
                {
                    "path": "test.py",
                    "content": "from solution import *\n"
                    + "".join(f"def test_{n}(): {one}\n" for n, one in enumerate(SIZES)),
                },
            ],
        },
        PAIR,
        "def pair(n): 0\ndef len(x): return 0\n",
    ),
    "HumanEval": (
        humaneval()
        | {
            "prompt": ROOT,
            "canonical_solution": "    return 2**0.5\n",
            "test": "def check(candidate):\n    assert math.fabs(at(candidate())) < 1e-6\n",
            "entry_point": "root",
        },
        f"{ROOT}    return 2**0.5\n",
        "import math\ndef at(x): return 0\ndef root(): 0\n",
    ),
}


@pytest.mark.parametrize("name", CROWDED)
def test_names_that_nobody_asks_for_replace_none_of_the_tests(name: str, tmp_path: Path) -> None:
    """Tests call libraries, built-in functions and helpers of the statement, which a program may define."""
    row, right, cheat = CROWDED[name]
    task = load(tmp_path, row)
    assert graded(task, right).outcome == "resolved"
    assert graded(task, cheat).outcome == "unresolved"


def test_what_sets_up_a_test_may_use_classes_of_the_solution(tmp_path: Path) -> None:
    node = "class Node:\n    def __init__(self, value):\n        self.value = value\n\n\n"
    code = node + "def twice(node):\n    return 2 * node.value\n"
    asked = {"test_list": ["assert twice(root) == 6"], "test_setup_code": "root = Node(3)"}
    assert graded(load(tmp_path, mbpp() | {"code": code} | asked), code).outcome == "resolved"


def test_a_function_that_a_library_has_too_may_be_asked_for(tmp_path: Path) -> None:
    roots = [f"assert sqrt({n * n}) == {n}" for n in range(4)]
    task = load(tmp_path, acecode() | {"inferences": [], "test_cases": roots})
    assert graded(task, "def sqrt(n):\n    return int(n**0.5)\n").outcome == "resolved"
    assert graded(task, "import math\n").outcome == "unresolved"


def test_few_short_cases_are_shown_and_no_endless_ones_kept(tmp_path: Path) -> None:
    """A case of a megabyte would fill the first message, and hundreds of cases the time of the tests."""
    inputs = [f"{n} " * (n + 1) for n in range(300)]
    outputs = [str(n * (n + 1)) for n in range(300)]
    task = load(tmp_path, taco({"inputs": ["1 " * 99_999, *inputs], "outputs": ["99999", *outputs]}))
    assert len(ids_of_tests(task.tests.files["test.py"])) == 20
    assert len(ids_of_tests(task.files["test.py"])) == 3
    assert len(task.files["test.py"]) < 3_000
    assert graded(task, SUM).outcome == "resolved"


def test_values_of_functions_may_stand_in_a_list_of_their_own(tmp_path: Path) -> None:
    """Published rows have both `[4]` and `4` for 4; a list is a list only where the row says so."""
    bare = CALLS | {"outputs": [0, 2, 4, 6]}
    for tests in (CALLS, bare):
        task = load(tmp_path, taco(tests, "def double(x):\n    return 2 * x\n"))
        assert graded(task, "def double(x):\n    return 2 * x\n").outcome == "resolved"
        assert graded(task, "def double(x):\n    return 2 * x + 1\n").outcome == "unresolved"


def test_tests_that_leave_out_their_import_get_it(tmp_path: Path) -> None:
    """As 85 of 232 rows in KodCode's repository do."""
    row = kodcode()
    task = load(tmp_path, row | {"test": row["test"].partition("\n")[2]})
    assert graded(task, row["solution"]).outcome == "resolved"


def test_a_packed_text_cannot_run_code(tmp_path: Path) -> None:
    """LiveCodeBench packs its hidden cases with pickle, which runs what it likes."""
    hostile = b64encode(compress(pickle.dumps(Path(tmp_path / "owned").touch))).decode()
    with pytest.raises(ConfigError, match=r"private_test_cases is neither JSON nor a packed text: it holds"):
        load(tmp_path, live_code_bench() | {"private_test_cases": hostile})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (kodcode() | {"test": 3}, r"row 1: as a row of KodCode-V1: .*`\$.test`"),
        ({k: v for k, v in kodcode().items() if k != "test"}, r"KodCode-V1: .*required field `test`"),
        (kodcode() | {"test": "def test_a(): assert 1 == 1"}, r"column test uses nothing of the solution"),
        (kodcode() | {"solution": "print 1"}, r"column solution is not Python"),
        (mbpp() | {"test_list": ["assert double(1) == 2", "assert ("]}, r"test_list\[1\] is not Python"),
        (humaneval() | {"test": "const testMean = () => {\n"}, r"column test is not Python"),
        (mbpp() | {"test_list": ["assert 1 == 1"]}, r"column test_list: its assertions call no function"),
        (
            acecode() | {"inferences": [], "test_cases": ["assert isclose(sqrt(4), 2)"]},
            r"column test_cases: which of isclose, sqrt is asked",
        ),
        (
            mbpp() | {"code": "def test_it(x): 0", "test_list": ["assert test_it(1)"]},
            r"it asks for test_it, which pytest would run as a test",
        ),
        (taco({}), r"APPS or TACO: column input_output: .*inputs"),
        (taco() | {"input_output": ""}, r"column input_output: "),
        (taco(SUMS | {"outputs": ["1"]}), r"column input_output: 6 inputs, but 1 outputs"),
        (taco({"inputs": [], "outputs": []}), r"no case can be used: there is none"),
        (taco({"inputs": ["x" * 100_001], "outputs": [""]}), r"has more than 100000 characters"),
        (taco({"inputs": [3], "outputs": ["3"]}), r"neither a text nor a list of lines"),
        (taco(CALLS | {"fn_name": "a b"}), r"function's name 'a b'"),
        (live_code_bench() | {"public_test_cases": cases(["1"], ["1"])[0]}, r"LiveCodeBench: .*public_test"),
        (live_code_bench() | {"private_test_cases": "????"}, r"column private_test_cases is neither JSON"),
        ({"question": "What?", "answer": "42"}, r"has no task_id, nor the columns of a published set"),
    ],
)
def test_a_bad_row_is_refused_with_its_column_and_a_remedy(
    row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        list(programs(tmp_path, row).load("train"))
    assert "rows.json: row 1" in str(caught.value)
    assert "--skip-bad leaves bad rows out" in str(caught.value)
