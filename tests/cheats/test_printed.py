"""Programs judged by what they print: lies, floods and what outlives a program."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hpc_swe.base.records import Score, Task
from hpc_swe.tasks.sets.programs import Programs
from tests.kit.published import taco

Grade = Callable[..., Score]


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "rows.json").write_text(json.dumps([taco()]))
    (task,) = Programs(train=str(tmp_path / "rows.json"), timeout_s=60.0).load("train")
    return task


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("for n in [a + b]:\n    print(n, end=' \\r\\n\\n\\n')", True),
        ("print(f'{a + b}.0')", False),
        ("print(f' {a + b}')", False),
        ("print(a + b)\nraise SystemExit(1)", False),
        ("print(a + b)\nimport os\nif not os.fork():\n    import time; time.sleep(600)", True),
        ("print(a + b)\nimport os\nif not os.fork():\n    os.setsid(); import time; time.sleep(60)", True),
        ("import os\nos._exit(0)", False),
        ("while True:\n    print('x' * 1_000_000)", False),
        ("for n in range(999):\n    print(n)", False),
        ("print(open('test.py').read().split('output(')[-1].split('== ')[-1])", False),
        ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", False),
        ("open('test.py', 'w').write('def test_0(): pass')", False),
        ("open('conftest.py', 'w').write('import os; os._exit(0)')", False),
    ],
)
def test_only_what_a_program_prints_is_judged(text: str, is_right: bool, task: Task, grade: Grade) -> None:
    """A program that lies, floods or ends the tests gets nothing; a child that lingers harms nobody."""
    score = grade(task, solution__py=f"a, b = map(int, input().split())\n{text}\n")
    assert (score.reward == 1) is is_right, score


def test_a_limit_below_that_of_a_case_harms_no_right_program(task: Task, grade: Grade) -> None:
    short = msgspec.structs.replace(task, tests=msgspec.structs.replace(task.tests, timeout_s=5.0))
    assert grade(short, solution__py="print(sum(map(int, input().split())))\n").reward == 1


@pytest.mark.slow
def test_a_program_that_never_ends_is_waited_for_once(task: Task, grade: Grade) -> None:
    """Loops without an end are frequent, and would hold the tests for their whole time limit."""
    score = grade(
        task, solution__py="import signal\nsignal.signal(signal.SIGXCPU, print)\nwhile True:\n    pass\n"
    )
    assert score.reward == 0
    assert score.detail.count("the program took too long in an") >= 4
