"""Rows are kept by the pass rates that an evaluation has measured."""

import json

import pyarrow.parquet as pq
import pytest

from hpc_swe.base.records import RunManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.base.store.parquet import evals
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.makers.select_rows import Band, selected
from tests.kit.checkout import typed

OUTCOMES = {"never": [0, 0, 0, 0], "some": [1, 0, 0, 0], "most": [1, 1, 1, 0], "always": [1, 1, 1, 1]}


@pytest.fixture
def evaluation(tmp_path):
    run = RunDir(tmp_path / "eval")
    attempts = [
        Attempt(
            task_id=task_id,
            index=n,
            sampling="sampled",
            sample=n,
            outcome="resolved" if solved else "unresolved",
            reward=float(solved),
        )
        for task_id, found in OUTCOMES.items()
        for n, solved in enumerate(found)
    ]
    lost = Attempt(task_id="most", index=4, sampling="sampled", sample=4, outcome="infra_error", reward=None)
    table = run.eval_table("eval")
    table.parent.mkdir(parents=True)
    evals.write(table, [*attempts, lost])
    empty = {"run_id": "", "commit": "", "config_sha256": "", "folder": ""}
    atomic.put(run.manifest, RunManifest(protocol=1, model_sha256="5e1f", environment={}, **empty))
    return run.root


def select(evaluation, rows, *words):
    return typed("hpc_swe.select_rows", evaluation, rows, *words)


def test_rows_between_the_rates_are_kept_with_what_was_measured(evaluation, tmp_path):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "kept.parquet"
    rows.write_text("".join(json.dumps({"task_id": name, "files": []}) + "\n" for name in [*OUTCOMES, "new"]))
    done = select(evaluation, rows, "--out", out)
    assert done.returncode == 0, done.stderr
    kept = pq.read_table(out).to_pylist()
    assert [(row["task_id"], row["pass_rate"], row["samples"]) for row in kept] == [
        ("some", 0.25, 4),
        ("most", 0.75, 4),  # what the infrastructure lost says nothing of the model
    ]
    assert {row["measured_model"] for row in kept} == {"5e1f"}
    assert "not measured" in done.stdout


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([0.0] * 8, "below 0.1"),
        ([1.0] + [0.0] * 9, "kept"),
        ([1.0] * 9 + [0.0], "kept"),
        ([1.0], "above 0.9"),
    ],
)
def test_both_ends_of_the_band_are_kept(found, verdict):
    assert [each for each, _ in selected([("a", {})], {"a": found}, Band(0.1, 0.9))] == [verdict]
