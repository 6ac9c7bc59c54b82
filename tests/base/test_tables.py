"""All tables at 80 columns: what stands first in a row is whole, and no number is lost."""

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table

from hpc_swe.base import tables
from hpc_swe.base.records import RoleStatus, Sampling
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.config import config as configuration
from hpc_swe.launch import preview
from hpc_swe.launch.plan import RunPlan
from hpc_swe.launch.view import Queue, RunView
from hpc_swe.makers import check
from hpc_swe.tasks.task_checks import Seconds, TaskCheck
from hpc_swe.view import status
from hpc_swe.view.evaluation import results
from hpc_swe.view.evaluation.results import Finished
from tests.kit.checkout import ROOT
from tests.kit.constants import status_report
from tests.kit.scripted import SMALL

LONG = "a_label_that_somebody_made_[long]_and_with_brackets_41"
SPEND = {name: 123.25 for name in check.COLUMNS}


def printed(*parts: object, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    tables.show(console, *parts)
    return console.file.getvalue().splitlines()


def starts(lines: list[str], name: str) -> int:
    """Rows that begin with the whole name and go on with something else."""
    return sum(line.lstrip(" |").startswith(f"{name} ") for line in lines)


def attempts(label: str) -> list[Attempt]:
    outcomes = ("resolved", "unresolved", "cheated", "no_submission", "infra_error")
    return [
        Attempt(task_id="t", index=i, sampling=label, sample=i, outcome=each, reward=0.0)
        for i, each in enumerate(outcomes)
    ]


def test_tables_of_an_evaluation_and_of_a_comparison():
    ways = {LONG: results.decoding(attempts(LONG), LONG, Sampling())}
    known = {"name": "x", "model": "m", "model_sha256": "", "url": "", "history": "keep", "versions": []}
    summary = results.Summary(**known, tasks=1, trained_on=[], decodings=ways)
    lines = printed(*results.summary_parts(summary))
    assert starts(lines, LONG) >= 3, lines
    assert {"infra failures", "detectable gain", "cheated", "1 of 5"} <= words(lines)
    found = Finished(attempts(LONG), {"t": SMALL}, {LONG: Sampling()})
    lines = printed(*results.comparison_parts("[a]/" + "long/" * 30, results.compare(found, found)))
    assert starts(lines, LONG) >= 1, lines
    assert {"won", "lost", "1 and 1"} <= words(lines)


def words(lines: list[str]) -> set[str]:
    """Contents of cells."""
    return {cell.strip() for line in lines for part in line.split("|") for cell in part.split("  ")}


def test_table_of_checked_tasks():
    seconds, name = Seconds(**SPEND), "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc"
    verdict = TaskCheck(
        task_id=name,
        verdict="usable",
        image="i",
        image_digest="d",
        settings="s",
        gold=["resolved"] * 3,
        empty=["unresolved"] * 3,
        seconds=seconds,
    )
    lines = printed(check.table([verdict]))
    assert starts(lines, name) >= 1, lines
    assert sum(line.count("123.25") for line in lines) == len(SPEND)
    assert {"3 resolved", "3 unresolved"} <= words(lines)


def test_tables_of_a_dry_run(tmp_path):
    shape = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"rms_norm_eps": 1e-6, "rope_theta": 1e4}))
    words = [f"model={tmp_path}", "counts.rollout=123456", "steps=1000000"]
    config = configuration.read(ROOT / "configs/demo.toml", ROOT / "configs/slurm.toml", overrides=words)
    found = [
        table
        for table in preview.cost_tables(RunPlan(RunDir(tmp_path / "run"), config))
        if isinstance(table, Table)
    ]
    names = [str(cell) for table in found for cell in next(iter(table.columns)).cells]
    lines = printed(*found)
    assert [name for name in names if not starts(lines, name)] == []
    assert max(map(len, lines)) <= 80
    assert len(names) > 20


@pytest.mark.parametrize("width", [60, 80])
def test_the_screen_of_a_run_keeps_names_and_last_values_of_its_curves(width):
    names = [f"solve/eval/{LONG[:30]}{n}" for n in range(3)]
    report = status_report(
        roles=[RoleStatus(role="rollout", desired=4, alive=3)],
        spools={"requests": {"ready": 1}},
        recent={name: [0.123456789e-9 * n for n in range(20)] for name in names},
    )
    view = RunView(name="r", steps=2, desired={"rollout": 4}, orders=[], queue=Queue(), report=report)
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(status.render(view, width))
    lines = console.file.getvalue().splitlines()
    assert [name for name in names if not any(line.startswith(f"{name}  2.346e-09") for line in lines)] == []
    assert any(line.split()[:3] == ["rollout", "4", "0"] for line in lines)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_every_column_of_a_table_is_shown_once_whatever_the_width(width):
    table = Table("name", title="a [title]")
    for n in range(9):
        table.add_column(f"column {n}", justify="right", no_wrap=True)
    names = {"first [x]": "1st", "second [/]": "2nd"}
    for name, cell in names.items():
        table.add_row(name, *(f"{cell}-{n}" for n in range(9)))
    lines = printed(table, width=width)
    text = "\n".join(lines)
    assert "a [title]" in text
    for name, cell in names.items():
        assert [text.count(f"{cell}-{n}") for n in range(9)] == [1] * 9
        assert name in text


def test_without_a_terminal_lines_are_as_wide_as_columns_says():
    code = (
        "from rich.table import Table; from hpc_swe.base import tables\n"
        "t = Table('task', 'x' * 40, 'y' * 40); t.add_row('n' * 50, '1', '2')\n"
        "tables.show(tables.screen(), t, '[bold]' + 'z' * 200)"
    )
    line = [sys.executable, "-c", code]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    for columns, rows in (("80", 2), ("", 1)):
        env = environment | ({"COLUMNS": columns} if columns else {})
        done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
        assert done.stdout.count("n" * 50) == rows, done.stdout + done.stderr
        assert "[bold]" + "z" * 200 in done.stdout
