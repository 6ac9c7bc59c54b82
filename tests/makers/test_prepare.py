"""Rows from wherever they come end as one file that a run reads, or all that is wrong with them is said."""

import json
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest

from hpc_swe.tasks.recipes import RECIPES
from hpc_swe.tasks.sets.programs import Programs
from hpc_swe.tasks.swebench_package import official
from tests.kit.checkout import typed
from tests.kit.published import ROWS as PUBLISHED
from tests.kit.toy import gold, row, taskset, write_rows

BASE = "0123456789abcdef0123456789abcdef01234567"
ROWS = [
    row("unittest", BASE),
    row("pytest", BASE),
    row("pytest", BASE, instance_id="toy__pytest-2", version="1.10"),
]
NEWER = {
    "image": "me/sweb.eval.x86_64.x_1776_y-1:latest",
    "eval_script": "#!/bin/bash\n: '>>>>> Start Test Output'\ntrue\n: '>>>>> End Test Output'\n",
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
    "image_assets": None,
    "FAIL_TO_PASS": ["a", "b"],
    "PASS_TO_PASS": [],
}


def prepare(source: object, out: Path, *words: object, cache: Path | None = None) -> tuple[int, str]:
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache or out.parent / "hf"), "COLUMNS": "200"}
    done = typed("hpc_swe.prepare", source, "--out", out, *words, **own)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def source(kind: str, folder: Path, rows: list[dict[str, object]]) -> Path:
    place = folder / kind
    if kind == "rows.jsonl":
        return write_rows(place, *rows)
    made = datasets.Dataset.from_list(rows)
    if kind == "rows.parquet":
        made.to_parquet(place)
    elif kind == "saved":
        made.save_to_disk(place)
    elif kind == "saved splits":
        datasets.DatasetDict(test=made, dev=made.select([0])).save_to_disk(place)
    else:
        (place / "data").mkdir(parents=True)
        made.to_parquet(place / "data/test-00000-of-00001.parquet")
    return place


@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.parquet", "saved", "saved splits", "as on a hub"])
def test_every_source_becomes_the_same_tasks_and_keeps_its_columns(tmp_path, kind):
    out = tmp_path / "tasks" / "toy.parquet"
    code, told = prepare(source(kind, tmp_path, ROWS), out)
    assert code == 0, told
    assert "3 rows in" in told
    assert told.splitlines()[1].split() == ["toy/pytest", "2", "1.0", "1.10", "needs", "a", "recipe"]
    made = pq.read_table(out)
    assert made.to_pylist() == ROWS
    assert pq.ParquetFile(out).metadata.row_group(0).column(0).compression == "ZSTD"
    tasks = list(taskset(out).load("train"))
    assert tasks == list(taskset(write_rows(tmp_path / "all.jsonl", *ROWS)).load("train"))


@pytest.mark.parametrize("kind", ["rows.jsonl", "as on a hub"])
def test_rows_of_swebench_5_are_kept_whole(tmp_path, kind):
    rows = [row("pytest", BASE, **NEWER), row("unittest", BASE, **NEWER)]
    out = tmp_path / "out.parquet"
    code, told = prepare(source(kind, tmp_path, rows), out)
    assert (code, told.count("its eval script")) == (0, 2), told
    (task, _) = taskset(out).load("train")
    assert (task.tests.command, task.image) == (NEWER["eval_script"], "sweb.eval.x86_64.x_1776_y-1")
    assert (task.tests.fail_to_pass, task.tests.pass_to_pass) == (["a", "b"], [])


def test_ids_select_and_order_and_what_they_leave_out_need_not_be_good(tmp_path):
    bad = row("unittest", BASE, test_patch="nonsense", instance_id="bad")
    rows = write_rows(tmp_path / "rows.jsonl", *ROWS, bad)
    ids = tmp_path / "ids.txt"
    ids.write_text("# two\ntoy__pytest-2\ntoy__unittest-1\n")
    out = tmp_path / "out.parquet"
    assert prepare(rows, out, "--ids", ids)[0] == 0
    assert pq.read_table(out)["instance_id"].to_pylist() == ["toy__pytest-2", "toy__unittest-1"]
    rows.write_text('{"task_id": "other", "files": []}\n{\n' + rows.read_text())
    code, told = prepare(rows, out, "--ids", ids)
    assert (code, "other" in told, f"{rows}:2" in told) == (0, False, False), told
    ids.write_text("toy__pytest-2\nother\n")
    code, told = prepare(rows, out, "--ids", ids)
    assert (code, f"{rows}:1: other: needs" in told, f"{rows}:2" in told) == (2, True, False), told
    ids.write_text("toy__pytest-2\ntoy__pytest-3\n")
    code, told = prepare(rows, tmp_path / "none.parquet", "--ids", ids)
    assert (code, f"{ids}:2: toy__pytest-3 is not a row" in told) == (2, True), told
    assert f"{rows}:2" in told, "it may be the row that is missing"


def test_all_bad_rows_are_named_and_nothing_is_written_unless_asked_for(tmp_path):
    rows = tmp_path / "rows.jsonl"
    wrong = [
        row("pytest", BASE, FAIL_TO_PASS="[]"),
        row("pytest", BASE, base_commit=None),
        row("unittest", BASE),
        row("pytest", BASE, patch=gold().replace("@@ -", "@@ -9")),
    ]
    lines = [json.dumps(one) for one in (ROWS[0], *wrong)]
    rows.write_text("\n".join([lines[0], "{", "[]", *lines[1:], ""]))
    out = tmp_path / "out.parquet"
    code, told = prepare(rows, out)
    named = [line.partition(":")[2].partition(":")[0] for line in told.splitlines() if str(rows) in line]
    assert named == ["2", "3", "4", "5", "6", "7"], told
    assert (code, out.exists()) == (2, False)
    assert "6 rows cannot be used: correct them, leave them out with --ids, or pass --skip-bad" in told
    code, told = prepare(rows, out, "--skip-bad")
    assert (code, pq.read_table(out).num_rows) == (0, 1), told
    assert {path.name for path in tmp_path.iterdir()} <= {"rows.jsonl", "out.parquet", "hf"}


@pytest.mark.parametrize(
    ("name", "words", "complaint"),
    [
        ("somebody/SWE-bench_Verified", [], "run this where the network is, or copy"),
        ("nowhere.parquet", [], "nowhere.parquet"),
        ("./nowhere", [], "./nowhere: there is no such file or folder"),
        ("saved splits", ["--split", "train"], "no split 'train', but test, dev: --split"),
        ("saved", ["--ids", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_a_source_that_is_not_there_is_one_error_with_its_remedy(tmp_path, name, words, complaint):
    place = source(name, tmp_path, ROWS) if name.startswith("saved") else name
    code, told = prepare(place, tmp_path / "out.parquet", *words)
    assert (code, told.count("error:")) == (2, 1), told
    assert complaint in told


def test_every_recipe_names_a_parser_of_swebench():
    parsers = official("harness.log_parsers").PARSER_REGISTRY
    assert len(RECIPES) == 12
    assert [repo for repo, recipe in RECIPES.items() if recipe.log_parser not in parsers] == []


def test_published_programs_become_rows_that_load_as_the_originals_do(tmp_path):
    """One bad row costs no other; what is written needs neither the set's columns nor the set."""
    source, out = tmp_path / "rows.json", tmp_path / "rows.parquet"
    good = [one for one, _ in PUBLISHED.values()]
    bad = [{"question": "What?"}, good[0]]
    source.write_text(json.dumps([*good, *bad]))
    code, words = prepare(source, out)
    assert code == 2
    assert f"{source}: row 11: the row has no task_id, nor the columns of a published set" in words
    assert f"{source}: row 12: Prefill_7_I occurs twice: {source}: row 1" in words
    code, words = prepare(source, out, "--skip-bad")
    assert code == 0, words
    assert "KodCode-V1" in words
    source.write_text(json.dumps(good))
    kept, loaded = (Programs(train=str(path)) for path in (out, source))
    tasks = list(kept.load("train"))
    assert tasks == list(loaded.load("train"))
    assert kept.references(tasks) == loaded.references(tasks)
