"""Numbers against brute force, comparisons that are refused, broken tables, and how swebench reads us."""

import json
from itertools import combinations, product

import msgspec
import numpy as np
import pytest

from hpc_swe.base import intervals
from hpc_swe.base.errors import ConfigError, CorruptRecord
from hpc_swe.base.records import Message, RunManifest, Sampling, Score, Task, ToolCall
from hpc_swe.base.rundir import PROTOCOL, RunDir
from hpc_swe.base.store import atomic
from hpc_swe.base.store.parquet import evals, tasks
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.config import config as configuration
from hpc_swe.tasks.graders.base import GradedPatch
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.view.evaluation import results
from hpc_swe.view.evaluation.results import Finished
from tests.kit.checkout import ROOT
from tests.kit.small_evaluation import official_report
from tests.kit.toy import gold, make_repository, row, taskset, write_rows


def attempts(solved: dict[str, list[int]], label: str = "greedy") -> list[Attempt]:
    return [
        Attempt(
            task_id=task,
            index=n,
            sampling=label,
            sample=n,
            outcome="resolved" if value else "unresolved",
            reward=float(value),
            exit_status="submitted",
        )
        for task, values in solved.items()
        for n, value in enumerate(values)
    ]


# numbers


def test_pass_at_k_is_the_mean_over_tasks_of_all_choices_of_k():
    rng = np.random.default_rng(1)
    solved = {str(n): rng.integers(0, 2, 5).tolist() for n in range(8)}
    found = results.decoding(attempts(solved), "greedy", Sampling())
    for k in range(1, 6):
        chances = [np.mean([any(some) for some in combinations(v, k)]) for v in solved.values()]
        assert found.pass_at[k].mean == pytest.approx(np.mean(chances))


def test_the_interval_of_a_gain_is_that_of_all_resamples_of_the_pairs():
    before, after = (
        {"a": [0, 1], "b": [0, 0], "c": [1, 1], "d": [0, 0]},
        {"a": [1], "b": [1], "c": [1], "d": [0]},
    )
    found = intervals.gain(before, after)
    changes = [np.mean(after[task]) - np.mean(before[task]) for task in before]
    everything = [np.mean(picked) for picked in product(changes, repeat=4)]
    low, high = np.percentile(everything, [2.5, 97.5])
    assert (found.mean, found.low, found.high) == pytest.approx((0.375, low, high), abs=0.13)


def test_a_gain_of_the_detectable_size_is_detected_four_times_in_five():
    rng = np.random.default_rng(0)
    before = {str(n): [0.0] for n in range(60)}
    draws = [dict(zip(before, rng.normal(0, 1, (60, 1)), strict=True)) for _ in range(100)]
    size = np.mean([intervals.detectable_gain(before, noise) for noise in draws])
    found = [intervals.gain(before, {t: v + size for t, v in noise.items()}) for noise in draws]
    assert 68 <= sum(gain.low > 0 for gain in found) <= 92


def test_an_episode_that_never_came_back_is_failed_and_told_apart():
    lost = Attempt(
        task_id="a", index=1, sampling="greedy", sample=1, outcome="infra_error", reward=None, retries=2
    )
    found = results.decoding([*attempts({"a": [1]}), lost], "greedy", Sampling())
    assert found.pass_at[1].mean == 0.5
    assert (found.infra_failures, found.at_most) == (1, 1.0), "said beside the number that they lower"
    assert (found.outcomes, found.retries) == ({"resolved": 1, "infra_error": 1}, 2)
    assert found.exits == {"submitted": 1, "none": 1}


# comparisons


def finished(solved: dict[str, list[int]], *labels: str, **sampling: float) -> Finished:
    labels = labels or ("greedy",)
    rows = [attempt for label in labels for attempt in attempts(solved, label)]
    return Finished(rows, {t: _task(t) for t in solved}, {label: Sampling(**sampling) for label in labels})


def test_a_comparison_is_paired_and_counts_what_was_won_and_lost():
    before, after = (
        finished({"a": [0, 0], "b": [1, 1], "c": [0, 1]}),
        finished({"a": [1], "b": [0], "c": [1]}),
    )
    (found,) = results.compare(before, after).values()
    assert (found.tasks, found.won, found.lost) == (3, 2, 1)
    assert found.gain.mean == pytest.approx((1 - 1 + 0.5) / 3)
    assert found.before.mean == pytest.approx(0.5)


def test_other_tasks_are_refused_unless_the_common_ones_are_asked_for():
    before, after = finished({"a": [0], "b": [1], "c": [1]}), finished({"a": [1], "b": [1]})
    with pytest.raises(
        ConfigError, match="the tasks differ: 3 there, 2 here, 2 in both; --common compares on those"
    ):
        results.compare(before, after)
    assert results.compare(before, after, common=True)["greedy"].tasks == 2
    with pytest.raises(ConfigError, match="0 in both$"):
        results.compare(finished({"x": [1]}), after, common=True)


def test_tasks_of_the_same_name_and_another_content_are_other_tasks():
    before, after = finished({"a": [0], "b": [1]}), finished({"a": [1], "b": [1]})
    after.tasks["b"] = msgspec.structs.replace(after.tasks["b"], files={"core.py": "another seed"})
    told = r"2 there, 2 here, 1 in both \(1 more by id only, such as b\); --common"
    with pytest.raises(ConfigError, match=told):
        results.compare(before, after)
    assert results.compare(before, after, common=True)["greedy"].tasks == 1


def test_what_is_compared_is_read_from_the_folder_of_a_finished_evaluation(tmp_path):
    run = RunDir(tmp_path / "run")
    _publish(run, "hub", [_task("a")])
    evals.write(run.eval_table("eval"), attempts({"a": [1]}))
    with pytest.raises(ConfigError, match=f"^{run.root}: not the folder of an evaluation: "):
        results.read(run)
    run.config.write_text(json.dumps({"eval": {"decodings": {"greedy": {"temperature": 0.5}}, "samples": 1}}))
    found = results.read(run)
    assert (list(found.tasks), found.decodings["greedy"].temperature) == (["a"], 0.5)


# tables


def test_what_is_written_is_read_and_long_values_leave_the_small_table(tmp_path):
    calls = [ToolCall(name="view", arguments='{"path": "m.py"}')]
    said = [
        Message(role="user", content="d\u00f6ne"),
        Message(role="assistant", content="", tool_calls=calls),
    ]
    (one,) = attempts({"a": [1]})
    one = msgspec.structs.replace(
        one, submission="diff", passed=["t"], versions=["v000000-i00"], messages=said, record=b"\x00\xff"
    )
    evals.write(tmp_path / "all.parquet", [one])
    assert evals.read(tmp_path / "all.parquet", without=()) == [one]
    evals.write(tmp_path / "small.parquet", [one], without=evals.LONG_COLUMNS)
    import pyarrow.parquet as pq

    names = pq.read_schema(tmp_path / "small.parquet").names
    assert "sandbox_s" in names
    assert not set(names) & set(evals.LONG_COLUMNS)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "other columns"])
def test_a_table_that_cannot_be_used_is_one_error_that_names_it(tmp_path, damage):
    path = tmp_path / "eval.parquet"
    evals.write(path, attempts({"a": [1]}))
    if damage == "missing":
        path.unlink()
    elif damage == "other columns":
        evals.write(path, attempts({"a": [1]}), without=["task_id"])
    else:
        path.write_bytes(path.read_bytes()[: 0 if damage == "empty" else -100])
    with pytest.raises(CorruptRecord, match=f"^{path}: "):
        evals.read(path)


def test_an_infrastructure_failure_is_a_prediction_only_with_a_patch(tmp_path):
    run = RunDir(tmp_path / "run")
    config = configuration.read(ROOT / "configs/demo.toml", overrides=["eval.samples=1"])
    _publish(run, "hub", [_task(name) for name in ("handed in", "lost", "nothing")])
    rows = [
        msgspec.structs.replace(row, submission=text, outcome=outcome, reward=reward)
        for label in config.eval.decodings
        for row, text, outcome, reward in zip(
            attempts({"handed in": [0], "lost": [0], "nothing": [0]}, label),
            ("diff", "", ""),
            ("infra_error", "infra_error", "no_submission"),
            (None, None, -1.0),
            strict=True,
        )
    ]
    evals.write(run.eval_table("eval"), rows)
    results.write(run, config)
    lines = run.predictions("greedy-0").read_text().splitlines()
    assert [json.loads(line)["instance_id"] for line in lines] == ["handed in", "nothing"]


# what the model has seen


def _publish(run: RunDir, model: str, held_out: list[Task] = (), train: list[Task] = ()) -> None:
    """What is left of a run that began in the folder above its own."""
    run.make()
    manifest = RunManifest(
        protocol=PROTOCOL,
        run_id="r",
        commit="",
        model_sha256="",
        config_sha256="",
        folder=str(run.root.parent),
        environment={},
    )
    atomic.put(run.manifest, manifest)
    run.config.write_text(json.dumps({"model": model, "steps": 1}))
    tasks.write(run.tasks, {"train": train, "eval": held_out})


def test_tasks_that_the_model_or_its_ancestors_were_trained_on_are_found(tmp_path):
    first, second = (RunDir(tmp_path / name) for name in ("sft", "grpo"))
    held_out = [_task(name) for name in ("same id", "same text", "unseen")]
    renamed = msgspec.structs.replace(held_out[1], task_id="another")
    _publish(first, "hub", train=[renamed])
    _publish(second, "sft/weights/v1", train=[held_out[0]])  # from the folder in which it was started
    model = second.weights / "v000003-i01"
    assert results.trained_on(model, held_out) == ["same id", "same text"]
    assert results.trained_on(tmp_path, held_out) == []


@pytest.mark.parametrize("damaged", ["{", "{}", '{"model": 7}', "[]"])
def test_an_ancestor_that_cannot_be_read_is_one_error_that_names_it(tmp_path, damaged):
    run = RunDir(tmp_path / "run")
    _publish(run, "hub")
    run.config.write_text(damaged)
    with pytest.raises(ConfigError, match=f"^{run.config}, which says what .*v1 was trained from: "):
        results.trained_on(run.weights / "v1", [])


def _task(name: str) -> Task:
    tree = {"task_id": name, "taskset": "t", "prompt": name, "image": "i", "workdir": "/w"}
    return msgspec.convert(tree | {"tests": {"command": "", "fail_to_pass": [], "timeout_s": 1}}, Task)


# swebench


def test_swebench_makes_the_same_report_of_our_predictions_and_logs(tmp_path):
    base = make_repository(tmp_path / "calc")
    ids = [f"toy__unittest-{n}" for n in range(5)]
    rows = write_rows(tmp_path / "rows.jsonl", *(row("unittest", base, instance_id=one) for one in ids))
    known = list(taskset(rows).load("train"))
    (fails,), (passes,) = known[0].tests.fail_to_pass, known[0].tests.pass_to_pass
    scores = [
        (gold(), Score(outcome="resolved", reward=1, passed=[fails, passes])),
        (gold(), Score(outcome="unresolved", reward=-1, passed=[passes], failed=[fails])),
        ("", Score(outcome="no_submission", reward=-1)),
        (gold(), Score(outcome="infra_error", reward=None)),
        ("", Score(outcome="infra_error", reward=None)),
    ]
    verdicts = [GradedPatch(task, *score) for task, score in zip(known, scores, strict=True)]
    Swebench().report(tmp_path, "greedy-0", "mine", verdicts)
    made = json.loads((tmp_path / "report.greedy-0.json").read_text())
    assert (made["total_instances"], made["resolved_ids"], made["unresolved_ids"]) == (5, ids[:1], ids[1:2])
    assert (made["empty_patch_ids"], made["error_ids"], made["incomplete_ids"]) == (
        ids[2:3],
        ids[3:4],
        ids[4:],
    )
    lines = [
        {"instance_id": v.task.task_id, "model_name_or_path": "mine", "model_patch": v.patch}
        for v in verdicts[:4]
    ]
    write_rows(tmp_path / "predictions.greedy-0.jsonl", *lines)
    assert official_report(tmp_path, "greedy-0", rows) == made
    (own,) = (tmp_path / "logs/run_evaluation/greedy-0/mine" / ids[1]).glob("report.json")
    assert json.loads(own.read_text())[ids[1]]["tests_status"]["FAIL_TO_PASS"] == {
        "success": [],
        "failure": [fails],
    }
