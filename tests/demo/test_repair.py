"""What a model learns is measured stage by stage: none is repeated, and none is taken for another one."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.demo import learned
from hpc_swe.demo.learned import ModelResult
from hpc_swe.demo.repair import Clock, Repair
from tests.kit.checkout import ROOT, environment
from tests.kit.toy_model import HERMES, make_model
from tests.kit.waiting import DEADLINE_S, until

TESTS = """from solution import f


def test_f():
    assert f(1) == 3


def test_more():
    assert f(2) == 5
"""
ROWS = [
    {
        "task_id": name,
        "files": [
            {"path": "solution.py", "content": "def f(x):\n    return x\n"},
            {"path": "test.py", "content": TESTS},
        ],
    }
    for name in ("first", "second")
]
REPLIES = ["```\ndef f(x):\n    return 2 * x + 1\n```", "```\ndef f(x):\n    return 3\n```"]


def words(folder: Path, model: Path, engine: str) -> list[str]:
    """Of two answers one is right, and there are more rows than the configuration takes."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    said = [[*tokenizer.encode(text).ids, tokenizer.token_to_id("<|im_end|>")] for text in REPLIES]
    replies = [{"token_ids": ids, "logprobs": [-0.5] * len(ids), "delay_s": 0.0} for ids in said]
    (folder / "replies.json").write_text(json.dumps(replies))
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        "configs/demo.toml",
        f'taskset={{type="programs", train="{folder}/train.jsonl", eval="{folder}/test.jsonl"}}',
        *('sandbox={type="process"}', 'agent={type="answer_agent"}', "tasks.train=1", "tasks.eval=1"),
        f'engine={{type="{engine}", replies="{folder}/replies.json"}}',
        *("rollout.slots=1", "poll_s=0.2", "eval.every=0"),
        *("groups.group_size=2", "groups.groups_per_step=2", "policy.tensor_parallel=1"),
    ]


@pytest.fixture
def repair(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    make_model(tmp_path / "model", HERMES)
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": 322}')
    model = tmp_path / "model"
    given = [*words(tmp_path, model, "scripted"), "rollout.context=4096"]
    return Repair(tmp_path / "out", given, model, samples=2, rate=2)


@pytest.mark.slow
def test_stages_that_are_done_are_neither_repeated_nor_taken_for_others(repair):
    files = repair.make_tasks()
    chosen = repair.choose(files["train"])
    found = [(row["task_id"], row["pass_rate"]) for row in pq.read_table(chosen).to_pylist()]
    assert found == [("first", 0.5)]
    repair.evaluate("base", repair.model, files["eval"])
    (base,) = repair.measured()
    assert [len(each) for each in base.attempts.values()] == [2, 1]
    before = {path: path.stat().st_mtime_ns for path in repair.root.rglob("*")}
    again = dataclasses.replace(repair, words=[*repair.words, "steps=99"])
    again.choose(files["train"])
    again.evaluate("base", repair.model, files["eval"])
    assert {path: path.stat().st_mtime_ns for path in repair.root.rglob("*")} == before
    with pytest.raises(ConfigError, match=r"eval\.samples: 2 -> 3"):
        dataclasses.replace(repair, samples=3).evaluate("base", repair.model, files["eval"])
    for rate in (0, 3):  # the rows were chosen by another one
        with pytest.raises(ConfigError, match=rf"teaching\.parquet was chosen with --rate 2, not {rate}"):
            dataclasses.replace(repair, rate=rate).choose(files["train"])
    spent = {path.stem: Clock(path).spent for path in (repair.root / "spent").rglob("*.json")}
    assert spent.keys() == {"rate", "select_rows", "base"}
    assert spent["select_rows"].seconds > 0
    assert repair.cost().startswith(f"{sum(each.seconds for each in spent.values()) / 3600:.2f} hours")


@pytest.mark.slow
def test_the_command_goes_on_after_a_kill_in_training(tmp_path):
    make = [sys.executable, "-m", "hpc_swe.demo.model", "--out", tmp_path / "model"]
    subprocess.run(make, cwd=ROOT, env=environment(), check=True, timeout=DEADLINE_S)
    line = [sys.executable, "-m", "hpc_swe.demo.repair", "--model", tmp_path / "model"]
    line += [*words(tmp_path, tmp_path / "model", "tests.kit.by_heart:ByHeart"), "--out", tmp_path / "out"]
    line += [
        "--steps=3",
        "--samples=2",
        "--rate=2",
        "--controls=rejection",
        "sft.samples_per_step=2",
        "steps=3",
    ]
    killed = subprocess.Popen([*map(str, line)], cwd=ROOT, env=environment())
    until(lambda: [*tmp_path.glob("out/grpo-0/weights/v000001-*")], "a first step", DEADLINE_S)
    killed.kill()
    killed.wait()
    rated = (tmp_path / "out/rate/summary.json").stat().st_mtime_ns
    done = subprocess.run(
        [*map(str, line)], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    lines = [row.split()[:3] for row in done.stdout.splitlines() if " sampled " in row or " greedy " in row]
    assert [(name, decoding) for name, decoding, _ in lines] == [
        (name, decoding) for name in ("base", "grpo-0", "rejection-0") for decoding in ("sampled", "greedy")
    ]
    assert [steps for *_, steps in lines] == ["0", "0", "3", "3", "3", "3"]
    assert (tmp_path / "out/rate/summary.json").stat().st_mtime_ns == rated
    assert (tmp_path / "out/curves.png").exists()


def test_the_shuffled_control_has_the_advantages_of_the_configuration(repair, tmp_path):
    scaled = dataclasses.replace(repair, words=[*repair.words, "advantage.scale_by_std=true"])
    files = {kind: scaled.config_of(kind, tmp_path / "rows.parquet") for kind in ("grpo", "shuffled")}
    assert files["shuffled"].advantage.of["scale_by_std"] == files["grpo"].advantage.scale_by_std is True
    assert files["shuffled"].groups == files["grpo"].groups


def attempt(task: str, number: int, *, solved: bool, patch: str = "p") -> Attempt:
    outcome = "resolved" if solved else "unresolved"
    known = {"sampling": "greedy", "outcome": outcome, "reward": float(solved), "submission": patch}
    return Attempt(task_id=task, index=number, sample=number, **known)


def test_faults_of_one_function_widen_the_interval_of_a_gain(tmp_path):
    """All tasks that are won are of one function: over tasks the gain is sure, over functions it is not."""
    names = [str(number) for number in range(40)]
    base = ModelResult(
        "base", attempts={"greedy": [attempt(name, 0, solved=False, patch="") for name in names]}
    )
    won = ModelResult("grpo-0", 9, 0.5, {"greedy": [attempt(n, 0, solved=int(n) < 20) for n in names]})
    rows = tmp_path / "rows.jsonl"
    kind = [f"m.py: f{max(0, int(name) - 19)}: operator" for name in names]
    lines = [{"task_id": n, "extra_info": {"task_name": k}} for n, k in zip(names, kind, strict=True)]
    lines.append({"question_id": "raw", "question": "", "solution": ""})  # of a set in its own columns
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = learned.table(base, [won], learned.functions(rows))
    assert "40 held-out tasks in 21 functions" in str(table.title)
    cells = {column.header: [*column.cells] for column in table.columns}
    over_tasks, over_functions = (
        cells[f"gain, over {what}"][1].partition("[")[2].split(",")[0] for what in ("tasks", "functions")
    )
    assert float(over_tasks) > 0.3
    assert float(over_functions) == 0.0
    assert cells["no patch"] == ["1.000", "0.000"]
    assert cells["GPU-hours"] == ["0.00", "0.50"]
