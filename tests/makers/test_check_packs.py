"""Published forms of buggy programs are checked by the command alone, in the sandbox that runs use."""

import pytest

from hpc_swe.tasks import task_checks
from hpc_swe.tasks.sets.programs import Programs
from hpc_swe.tasks.visible_tests import ids_of_tests
from tests.kit import packs
from tests.kit.checkout import IMAGES, typed


@pytest.mark.slow
def test_faults_fail_and_repairs_pass_in_rows_of_humanevalpack(tmp_path):
    """One of the faults is an endless loop."""
    if not (IMAGES / "python-pytest.sif").exists():
        pytest.skip("the task image is not built: containers/build_image.sh")
    names = packs.write(tmp_path / "pack.jsonl")
    words = [f"taskset.eval={tmp_path}/pack.jsonl", "tasks.train=0", "tasks.eval=164", "taskset.timeout_s=5"]
    words += ["--out", str(tmp_path / "checked.jsonl"), "--runs", "1", "--jobs", "2"]
    done = typed("hpc_swe.check", "configs/swepdb.toml", *words)
    assert done.returncode == 0, done.stderr
    checks = task_checks.read(tmp_path / "checked.jsonl")
    assert sorted(checks) == sorted(names)
    assert {(*one.gold, *one.empty) for one in checks.values()} == {("resolved", "unresolved")}
    assert {name: one.verdict for name, one in checks.items() if one.verdict != "usable"} == {
        "Python-3": "unsealed"  # it compares two computed values, and nothing else
    }


def test_half_of_the_assertions_of_a_row_of_humanevalpack_are_hidden(tmp_path):
    packs.write(tmp_path / "pack.jsonl")
    tasks = [*Programs(eval=str(tmp_path / "pack.jsonl")).load("eval")]
    seen = [len(ids_of_tests(task.files["test.py"])) for task in tasks]
    graded = [len(ids_of_tests(task.tests.files["test.py"])) for task in tasks]
    assert seen == [(count + 1) // 2 for count in graded]
    assert sum(seen) < sum(graded)
    assert all("canonical" not in str(task) for task in tasks)
