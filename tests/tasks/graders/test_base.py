"""The run of a task's own files may be spoiled by the host: what it then shows must not stay."""

import gc

import msgspec
import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.agents.tools.evaluate import Evaluate
from hpc_swe.base.records import TestPlan
from hpc_swe.tasks.graders._exam import Exam
from hpc_swe.tasks.graders.base import RESOLVED
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.tasks.patch import difference
from tests.kit.cheats.cheat_task import RIGHT, TASK
from tests.kit.constants import varied

HIDDEN = """import pytest


def test_elsewhere():
    pytest.skip("not on this machine")


def test_adds():
    from mod import add

    assert add(20, 30) == 50
"""
# The program hangs at its import, as long as it has hung less often than this.
HANGS = """import os, time
been = len(os.listdir({marks!r}))
if been < {times}:
    open(os.path.join({marks!r}, str(been)), "w").close()
    time.sleep(60)
"""


def task_that_hangs(marks, times, hidden=HIDDEN):
    names = ["test_hidden.py::test_elsewhere", "test_hidden.py::test_adds"]
    plan = TestPlan(
        command="python -m pytest -q test_hidden.py",
        files={"test_hidden.py": hidden},
        fail_to_pass=names,
        timeout_s=3.0,
    )
    files = {"mod.py": HANGS.format(marks=str(marks), times=times) + "def add(a, b): return 0\n"}
    return msgspec.structs.replace(TASK, files=files, tests=plan)


def outcome(task, expects_final=True):
    score = Pytest().grade(task, difference("mod.py", task.files["mod.py"], RIGHT), Process())
    assert score.is_final == expects_final, "equal patches may share it"
    return score.outcome


@pytest.mark.parametrize("own", [{}, {"pyproject.toml": "[project]\n"}, {"pytest.ini": "[pytest]\n"}])
def test_settings_above_a_sandbox_change_nothing(tmp_path, own):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    (tmp_path / "conftest.py").write_text("raise SystemExit(3)\n")
    task, sandboxes = (
        msgspec.structs.replace(TASK, files=TASK.files | own),
        varied(Process, scratch=str(tmp_path))(),
    )
    patch = difference("mod.py", TASK.files["mod.py"], RIGHT)
    assert Pytest().grade(task, patch, sandboxes).outcome == "resolved"
    with sandboxes.open(task) as sandbox:
        assert "1 failed, 1 passed" in Evaluate()(sandbox, task)


def at_once(text):
    return "import mod\n" + text


@pytest.mark.parametrize("times", [1, 99])
def test_a_test_is_excused_that_a_hanging_program_skips_as_well(tmp_path, times):
    assert outcome(task_that_hangs(tmp_path, times), expects_final=False) == "resolved"


def test_what_a_late_run_did_not_show_is_asked_again(tmp_path):
    task = task_that_hangs(tmp_path, 1, at_once(HIDDEN))
    assert [outcome(task, expects_final=False), outcome(task)] == ["unresolved", "resolved"]


def test_a_program_that_never_ends_is_not_run_for_each_patch(tmp_path):
    task = task_that_hangs(tmp_path, 99, at_once(HIDDEN))
    task = msgspec.structs.replace(task, tests=msgspec.structs.replace(task.tests, timeout_s=2.0))
    assert [outcome(task, expects_final=number > 1) for number in range(4)] == ["unresolved"] * 4
    assert len([*tmp_path.iterdir()]) == 3


def test_a_worker_keeps_no_task_of_a_grading(tmp_path):
    task = msgspec.structs.replace(task_that_hangs(tmp_path, 0), task_id="kept")
    assert outcome(task) == "resolved"
    gc.collect()
    assert [one for one in gc.get_objects() if type(one) is Exam and one.task.task_id == "kept"] == []


@pytest.mark.parametrize("grader", [Pytest(), Swebench()], ids=["pytest", "swebench"])
def test_a_lie_that_is_paid_once_in_31_times_is_worth_less_than_a_failure(grader):
    lie = (RESOLVED + 30 * grader.cheated_reward) / 31
    assert lie < grader.unresolved_reward
