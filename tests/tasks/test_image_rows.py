"""Rows whose image holds the tests: they start without them, and are judged with those of the image."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.base.errors import ConfigError, SandboxError
from hpc_swe.makers.check import Checker
from hpc_swe.makers.images.sources import Pulled
from hpc_swe.makers.images.store import ImageStore, Problem
from hpc_swe.makers.prepare import prepare, write
from hpc_swe.tasks import task_checks
from hpc_swe.tasks.graders.swebench import Swebench as Grader
from hpc_swe.tasks.patch import take
from hpc_swe.tasks.published_rows import read_row
from hpc_swe.tasks.sets.swebench import Source, Swebench
from tests.kit.published_image import HIDDEN, TESTS, publish
from tests.kit.published_rows import r2e_row, smith_row
from tests.kit.toy import BROKEN, MENDED, REVERTS, Checkout, gold, make_repository, new, patch

SOLVED = patch("calc/core.py", MENDED.replace("2 * a", "3 * a"), MENDED)
CHEATS = {
    "edits the hidden test": new(HIDDEN, "def test_double():\n    pass\n\n\ndef test_add():\n    pass\n"),
    "adds a plugin": new("conftest.py", "def pytest_collection_modifyitems(items):\n    items.clear()\n"),
    "nothing": "",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of an image of SWE-smith: its youngest commit is sound, and has the tests."""
    folder = tmp_path_factory.mktemp("sound") / "calc"
    make_repository(folder, {HIDDEN: TESTS})
    return folder


def load(folder: Path, *rows: dict[str, object]):
    """Write rows as `prepare` does, and read them as a run does."""
    good, complaints = prepare([(f"rows: row {n}", row) for n, row in enumerate(rows)], None)
    assert complaints == []
    write(good, folder / "rows.parquet")
    return Swebench(train=Source(rows=str(folder / "rows.parquet")), timeout_s=120.0)


def grade(task, text, sandboxes):
    score = Grader(second_sittings=0).examine(task, text, sandboxes)
    return score.outcome if score.outcome in ("resolved", "unresolved") else score


@pytest.mark.slow
def test_the_check_of_such_a_row_finds_retests_that_a_run_uses(sound, tmp_path):
    """The versions of hidden tests are of the image's, which the set has never seen."""
    taskset, sandboxes, grader = load(tmp_path, smith_row()), Checkout(repository=str(sound)), Grader()
    (task,) = taskset.load("train")
    checked = Checker(grader, sandboxes, 1).check(task, taskset.references([task])[task.task_id])
    assert (checked.verdict, checked.reason, bool(checked.changed_tests)) == ("usable", "", True)
    task_checks.append(tmp_path / "checked.jsonl", checked)
    run = msgspec.structs.replace(taskset, checked=str(tmp_path / "checked.jsonl"))
    (task,) = run.load("train")
    versions = run.changed_tests([task])[task.task_id]
    task = msgspec.structs.replace(
        task, tests=msgspec.structs.replace(task.tests, extra=task.tests.extra | {"changed_tests": versions})
    )
    assert grader.examine(task, SOLVED, sandboxes).outcome == "resolved"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("published")
    publish(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
def test_rows_of_both_sets_are_judged_in_images_built_of_published_ones(images, tmp_path):
    sandboxes = Apptainer(images=str(images))
    fault = patch("calc/core.py", BROKEN, BROKEN.replace("2 * a", "3 * a"))
    taskset = load(tmp_path, smith_row(patch=fault, PASS_TO_PASS=[]), r2e_row())
    of_smith, of_r2e = taskset.load("train")
    references = taskset.references([of_smith, of_r2e])
    store, source = ImageStore(images), Pulled(str(images / "published.sif"), sandboxes)
    for task in (of_smith, of_r2e):
        assert store.build(source, Problem(task, references[task.task_id]))
    with sandboxes.open(of_r2e) as sandbox:
        looked = sandbox.run("ls / /testbed; find / -name 'test_1*' -not -path '/proc/*'", 60).output
        assert not {"r2e_tests", "run_tests.sh", "/r2e_tests/test_1.py"} & {*looked.split("\n")}
        assert sandbox.run("find . -name __pycache__", 60).output == ""
        sandbox.write("calc/core.py", MENDED.encode())
        sandbox.write("r2e_tests/test_1.py", b"def test_double():\n    pass\n")
        mended = take(of_r2e, sandbox, sandboxes)
    with sandboxes.open(of_smith) as sandbox:
        assert "3 * a" in sandbox.read("calc/core.py").decode()
        assert "test_add" not in sandbox.run("git log -p --all; cat tests/*.py", 60).output
        for revert in REVERTS:
            sandbox.run(revert, 60)
            assert sandbox.run("grep -rn '2 [*] a' .", 60).output == "", revert
    too_much = MENDED.replace("a + b", "a + b - 3 * (a == b == 4)")  # the test that must fail passes, too
    wanted = [(mended, "resolved"), (gold(), "resolved"), ("", "unresolved")]
    wanted.append((patch("calc/core.py", BROKEN, too_much), "unresolved"))
    assert [grade(of_r2e, text, sandboxes) for text, _ in wanted] == [outcome for _, outcome in wanted]
    solved = references[of_smith.task_id]
    outcomes = [grade(of_smith, text, sandboxes) for text in (solved, *CHEATS.values())]
    assert outcomes == ["resolved", *["unresolved"] * len(CHEATS)]


def test_an_image_without_the_hidden_tests_blames_no_policy(sound, tmp_path):
    row = smith_row(FAIL_TO_PASS=["tests/test_other.py::test_a"])
    (task,) = load(tmp_path, row).load("train")
    with pytest.raises(SandboxError, match="lacks the hidden tests of acme__tool.1fd52536.lm_1"):
        Grader().examine(task, SOLVED, Checkout(repository=str(sound)))


def test_columns_that_say_two_things_of_the_tests_are_refused():
    row = {"instance_id": "one", "repo": "a/b", "base_commit": "HEAD", "patch": gold(), "version": ""}
    row |= {"problem_statement": "", "FAIL_TO_PASS": ["a"], "PASS_TO_PASS": [], "hidden_tests": ["a.py"]}
    with pytest.raises(ConfigError, match="columns hidden_tests and test_patch: one of them says"):
        read_row("rows:1", json.dumps(row | {"test_patch": gold()}))
