"""Rows of both formats become the same tasks, and bad rows are named."""

import json
from pathlib import Path

import msgspec
import pytest

from hpc_swe.base.errors import ConfigError
from hpc_swe.tasks.recipes import DJANGO
from hpc_swe.tasks.sets.swebench import Source, Swebench
from tests.kit.toy import gold, row, taskset, write_rows

MARKS = "#!/bin/bash\n: '>>>>> Start Test Output'\ntrue\n: '>>>>> End Test Output'\n"
BASE = "0123456789abcdef0123456789abcdef01234567"


def only(rows: Path, **more):
    (task,) = taskset(rows, **more).load("train")
    return task


def test_a_row_of_twelve_columns_becomes_a_task(tmp_path):
    task = only(write_rows(tmp_path / "rows.jsonl", row("unittest", BASE)))
    assert (task.task_id, task.base_commit, task.workdir) == ("toy__unittest-1", BASE, "/testbed")
    assert task.image == "sweb.eval.x86_64.toy_1776_unittest-1"
    assert "add subtracts {sic}" in task.prompt
    assert task.tests.fail_to_pass == ["test_add (tests.test_core.TestCore)"]
    assert task.tests.pass_to_pass == ["Twice a number is the number doubled."]
    assert "python -m unittest -v tests/test_core.py\n" in task.tests.command
    assert f"git checkout {BASE} -- tests/test_core.py" in task.tests.command
    assert gold() not in msgspec.json.encode(task).decode()


def test_rows_of_swebench_5_keep_their_own_script_and_image(tmp_path):
    columns = {
        "image": "registry/swebench/sweb.eval.x86_64.x_1776_y-1:latest",
        "eval_script": MARKS,
        "log_parser": "parse_log_flask",
        "eval_type": "pass_and_fail",
        "image_assets": None,
        "FAIL_TO_PASS": ["a", "b"],
    }
    task = only(write_rows(tmp_path / "rows.jsonl", row("pytest", BASE, **columns)))
    assert task.image == "sweb.eval.x86_64.x_1776_y-1"
    assert task.tests.command == columns["eval_script"]
    assert task.tests.extra["log_parser"] == "parse_log_flask"
    assert task.tests.fail_to_pass == ["a", "b"]


@pytest.mark.parametrize(
    ("end", "name"),
    [("", ""), (":latest", ""), (":1", "+1"), ("@sha256:0", "+sha256-0"), (":1@sha256:0", "+1-sha256-0")],
)
def test_a_name_of_an_image_has_no_registry_and_the_tag_but_latest(tmp_path, end, name):
    rows = write_rows(tmp_path / "rows.jsonl", row("pytest", BASE, image=f"host:5000/me/words{end}"))
    assert only(rows).image == f"words{name}"


def test_ids_select_and_order(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", row("unittest", BASE), row("pytest", BASE))
    (tmp_path / "train").write_text("# mine\ntoy__pytest-1\n\n")
    (tmp_path / "eval").write_text("toy__unittest-1\n")
    made = Swebench(
        train=Source(rows=str(rows), ids=str(tmp_path / "train")),
        eval=Source(rows=str(rows), ids=str(tmp_path / "eval")),
        recipes=taskset(rows).recipes,
    )
    assert [task.task_id for task in made.load("train")] == ["toy__pytest-1"]
    assert [task.task_id for task in made.load("eval")] == ["toy__unittest-1"]
    assert list(Swebench(train=made.train, recipes=made.recipes).load("eval")) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"FAIL_TO_PASS": "[]"}, "rows.jsonl:2: toy__pytest-1: FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": "['a']"}, "rows.jsonl:2: FAIL_TO_PASS is not a list of names in JSON"),
        ({"PASS_TO_PASS": "['a']"}, "rows.jsonl:2: PASS_TO_PASS is not a list of names in JSON"),
        ({"base_commit": None}, "rows.jsonl:2: Expected `str`, got `null` - at `$.base_commit`"),
        ({"test_patch": "hello"}, "rows.jsonl:2: test_patch is empty"),
        ({"patch": "--- a/x\n+++ b/x\n@@ -1,9 +1,9 @@\n x\n"}, "rows.jsonl:2: patch is not a patch"),
        ({"repo": "no/body"}, "rows.jsonl:2: toy__pytest-1 has no eval_script, and [taskset.recipes] none"),
        ({"eval_script": "true"}, "rows.jsonl:2: toy__pytest-1: eval_script without log_parser"),
        (
            {"eval_script": MARKS, "log_parser": "parse_log_nobody"},
            "rows.jsonl:2: toy__pytest-1: swebench.harness.log_parsers has no log_parser 'parse_log_nobody'",
        ),
        (
            {"eval_script": MARKS.replace("Start", "Begin"), "log_parser": "parse_log_pytest"},
            "rows.jsonl:2: task toy__pytest-1: its eval script must hold",
        ),
        ({"image": "x/"}, "rows.jsonl:2: toy__pytest-1: column image: 'x/' gives no name of an image"),
        ({"image": "a/.."}, "rows.jsonl:2: toy__pytest-1: column image: 'a/..' gives no name"),
        ({"instance_id": "a\nb"}, "column instance_id: 'a\\nb' gives no name of an image"),
        ({"image": "oras://host/a"}, "column image: 'oras://host/a': of all schemes only docker:// is known"),
        ({"workdir": "/"}, "rows.jsonl:2: toy__pytest-1: column workdir: '/' is no folder"),
        ({"workdir": "/../etc"}, "rows.jsonl:2: toy__pytest-1: column workdir: '/../etc' is no folder"),
        ({"workdir": 7}, "got `int` - at `$.workdir`; if its workdir is of another kind, rename the column"),
        ({"recipe": "bake"}, "`$.recipe`; if its recipe is of another kind, rename the column"),
        ({"eval_type": "fail_only"}, "rows.jsonl:2: toy__pytest-1: eval_type 'fail_only'"),
        ({"instance_id": "toy__unittest-1"}, "rows.jsonl:2: toy__unittest-1 occurs twice"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, change, complaint):
    rows = write_rows(tmp_path / "rows.jsonl", row("unittest", BASE), row("pytest", BASE, **change))
    with pytest.raises(ConfigError) as caught:
        list(taskset(rows).load("train"))
    assert complaint in str(caught.value)


def test_a_scheme_before_an_image_and_a_last_slash_change_nothing(tmp_path):
    rows = [
        row("pytest", BASE, image=image, workdir=workdir)
        for image, workdir in (("host:1/me/tool:b", "/app"), ("docker://host:1/me/tool:b", "/app/"))
    ]
    plain, other = (
        list(taskset(write_rows(tmp_path / f"{number}.jsonl", each)).load("train"))
        for number, each in enumerate(rows)
    )
    assert other == plain
    assert (plain[0].image, plain[0].tests.extra["image"]) == ("tool+b", "me/tool:b")


def test_what_is_no_json_an_unknown_id_and_a_name_of_a_hub_are_refused(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row("pytest", BASE)) + "\n{\n")
    with pytest.raises(ConfigError, match=r"rows.jsonl:2"):
        list(taskset(rows).load("train"))
    write_rows(rows, row("pytest", BASE))
    (tmp_path / "ids").write_text("\ntoy__pytest-2\n")
    with pytest.raises(ConfigError, match=r"ids:2: toy__pytest-2 is not a row of"):
        list(taskset(rows, train={"rows": str(rows), "ids": str(tmp_path / "ids")}).load("train"))
    with pytest.raises(ConfigError, match=r"is no .jsonl, .json or .parquet"):
        list(Swebench(train=Source(rows="SWE-bench/SWE-bench_Verified")).load("train"))


def test_a_task_in_both_splits_is_refused(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", row("pytest", BASE))
    with pytest.raises(ConfigError, match="toy__pytest-1 is in train and in eval"):
        list(taskset(rows, eval={"rows": str(rows)}).load("train"))


def test_django_is_known_and_its_labels_are_modules(tmp_path):
    change = {
        "repo": "django/django",
        "test_patch": (gold() + gold()).replace("calc/core.py", "tests/a/b.py"),
    }
    task = only(write_rows(tmp_path / "rows.jsonl", row("pytest", BASE, **change)))
    assert f"{DJANGO.command} a.b\n" in task.tests.command


def test_braces_of_a_prompt_and_of_a_report_stay(tmp_path):
    report = row("unittest", BASE, problem_statement="{workdir} {} {0}")
    prompt = 'Answer {"done": true} in {workdir}: {problem_statement}'
    task = only(write_rows(tmp_path / "rows.jsonl", report), prompt=prompt)
    assert task.prompt == 'Answer {"done": true} in /testbed: {workdir} {} {0}'
