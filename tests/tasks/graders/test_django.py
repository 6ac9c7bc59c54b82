"""Real instances: what Django did resolves, an agent's copy of it too, nothing does not, three times over.

Wants `.cache/swebench/rows.jsonl` (rows of SWE-bench) and their images, of hpc_swe/makers/build_images.py;
docs/swebench.md says how. It takes every row whose image is there.
"""

import json
import shutil

import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.base.records import Task
from hpc_swe.makers.check import Checker
from hpc_swe.tasks import patch
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.tasks.sets import swebench
from tests.kit.checkout import ROOT

pytestmark = pytest.mark.slow
CACHE = ROOT / ".cache"
ROWS = CACHE / "swebench" / "rows.jsonl"
IMAGES = CACHE / "images"
UNFIT = {"django__django-15103"}
"""Its test expects of `strip_tags` what html.parser did before Python's security releases of 2025."""


def found() -> list[Task]:
    if shutil.which("apptainer") is None or not ROWS.exists():
        return []
    tasks = swebench.Swebench(train=swebench.Source(rows=str(ROWS))).load("train")
    return [task for task in tasks if (IMAGES / f"{task.image}.json").exists()]


TASKS = found()


def test_there_are_real_instances_to_judge():
    if not TASKS:
        pytest.skip(f"no real instance is judged here: no Apptainer, no {ROWS}, or no image of its rows")
    assert len(TASKS) >= 5, "build some more images: hpc_swe/makers/build_images.py"


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.task_id)
def test_the_reference_resolves_and_nothing_does_not(task):
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    (reference,) = [row["patch"] for row in rows if row["instance_id"] == task.task_id]
    sandboxes, grader = Apptainer(images=str(IMAGES)), Swebench()
    verdict = Checker(grader, sandboxes, 3, IMAGES).check(task, reference)
    if task.task_id in UNFIT:
        assert (verdict.verdict, verdict.gold) == ("gold_fails", ["unresolved"] * 3), verdict
        assert "test_strip_tags" in verdict.reason
        return
    assert (verdict.verdict, verdict.gold) == ("usable", ["resolved"] * 3), verdict
    assert verdict.empty == ["unresolved"] * 3
    with sandboxes.open(task) as sandbox:
        sandbox.write(".git/reference", reference.encode())
        assert sandbox.run("git apply .git/reference", 60).exit_code == 0
        handed_in = patch.take(task, sandbox, sandboxes)
    wanted = sorted({*task.tests.fail_to_pass, *task.tests.pass_to_pass})
    score = grader.grade(task, handed_in, sandboxes)
    assert (score.outcome, score.failed, score.passed) == ("resolved", [], wanted), score
    score = grader.examine(task, "", sandboxes)
    assert score.outcome == "unresolved", score
    assert set(score.failed) == set(task.tests.fail_to_pass)
