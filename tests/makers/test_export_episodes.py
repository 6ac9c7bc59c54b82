"""Rewarded episodes become rows, and a run trains the very tokens that were sampled."""

import subprocess
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from hpc_swe.agents.loops.base import Result
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import (
    Episode,
    ExitStatus,
    Message,
    RolloutRequest,
    Sampling,
    Score,
    ScoredEpisode,
    ToolCall,
    id_array,
)
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.parquet import evals
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import EvalConfig
from hpc_swe.config.tokenization import token_builder
from hpc_swe.launch import create, plan, trajectories
from hpc_swe.makers.export_episodes import RunExport, collect
from hpc_swe.roles.coordinator import archive
from hpc_swe.roles.rollout.episode import Played, record
from tests.kit.checkout import ROOT, typed
from tests.kit.recording import V1, serve, stage
from tests.kit.toy_model import CONTROL, HERMES, make_model

REPLY = 'I look.\n<tool_call>\n{"name": "view", "arguments": {"path": "m.py"}}\n</tool_call>'
WORDS = ['sandbox={type="process"}', "agent.show_tools=true"]
WORDS += [f"{key}=4000" for key in ("rollout.context", "batches.microbatch_tokens")]


@pytest.fixture
def config(tmp_path):
    model = make_model(tmp_path / "model", HERMES)
    return configuration.read(ROOT / "configs/demo.toml", overrides=[f"model={model}", *WORDS])


def episode(run: RunDir, config, group: int, index: int = 0) -> Episode:
    """Recorded by the real recorder; the second turn is spelled in tokens that no encoder would choose."""
    builder, preface = token_builder(config), config.agent.preface
    spelled = [builder.tokens.encode(letter)[0] for letter in f"view {group}"] + [builder.end_id]
    serve(run, e1=[V1])
    recorder = stage(
        run, builder, answers=[builder.tokens.encode_whole(REPLY) + [builder.end_id], spelled]
    ).recorder
    view = ToolCall(name="view", arguments='{"path": "m.py"}')
    messages = [
        Message(role="system", content="Fix the bug."),
        Message(role="user", content=f"task {group}"),
        Message(role="assistant", content="I look.", tool_calls=[view]),
        Message(role="tool", content="x = 1"),
        Message(role="assistant", content=f"view {group}"),
    ]
    recorder(messages[:2], preface.tools)
    recorder(messages[:4], preface.tools)
    request = RolloutRequest(group_id=group, index=index, task_id=f"t{group}", seed=1, sampling=Sampling())
    return record(request, recorder, Played(Result(ExitStatus.SUBMITTED, messages)), "w")


def scored(made: Episode, reward: float | None, outcome: str = "resolved") -> ScoredEpisode:
    return ScoredEpisode(episode=made, score=Score(outcome=outcome, reward=reward))


@pytest.fixture
def run(tmp_path, config):
    """Of six episodes of four tasks three are resolved, two of these on one task."""
    made = RunDir(tmp_path / "run")
    made.make()
    create.publish(made, made, config, plan.Taken({}), "")
    made.root.chmod(0o700)
    episodes = [episode(made, config, group) for group in range(4)] + [
        episode(made, config, 0, 1),
        episode(made, config, 1, 1),
    ]
    rewards = [
        (1.0, "resolved"),
        (1.0, "resolved"),
        (0.0, "unresolved"),
        (None, "infra_error"),
        (1.0, "resolved"),
        (1.0, "cheated"),
    ]
    results = [scored(each, *reward) for each, reward in zip(episodes, rewards, strict=True)]
    archive.write(made.archive(0), results[:3], [0])
    archive.write(made.archive(1), results[3:], [0])
    return made


def export(run: RunDir, out: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return typed("hpc_swe.export_episodes", run.root, "--out", out, *words, COLUMNS="200")


def sft(config, *words: str):
    tree = configuration.dump(config)
    files = [ROOT / "configs/demo.toml", ROOT / "configs/demo_sft.toml"]
    return configuration.read(*files, overrides=[f"model={tree['model']}", *WORDS, *words])


def test_exported_episodes_are_trained_token_by_token_as_sampled(run, config, tmp_path):
    out = tmp_path / "rows.parquet"
    done = export(run, out)
    assert done.returncode == 0, done.stderr
    assert "6 episodes read, 3 with a reward of 1 or more" in done.stdout
    trained = sft(config, f'sft={{trajectories=["{out}"]}}')
    found = trajectories.take(trained)
    assert [each.task_id for each in found] == ["t0", "t0", "t1"]
    by_task = {"t0": 0, "t1": 1}
    for each in found:
        (sampled,) = {
            turns_of(s.episode)
            for s in archive.read(run.archive(0))
            if s.episode.request.group_id == by_task[each.task_id]
        }
        assert (each.token_ids, each.mask) == sampled
    builder = token_builder(config)
    ids = id_array(found[0].token_ids).tolist()
    assert ids != builder.demonstration(*conversation(out))[0]  # the text would be other tokens
    other = make_model(tmp_path / "other", HERMES) / "tokenizer.json"
    other.write_text(other.read_text().replace(f'"{CONTROL[6]}"', '"<response>"'))
    with pytest.raises(ConfigError, match=r"rows.parquet: row 1: token_ids: of another tokenizer"):
        trajectories.take(msgspec.structs.replace(trained, model=str(other.parent)))


def turns_of(made: Episode) -> tuple[bytes, bytes]:
    parts = [
        (p, mark) for t in made.turns for p, mark in ((t.appended_ids, b"\0"), (t.completion_ids, b"\1"))
    ]
    return b"".join(part for part, _ in parts), b"".join(mark * (len(part) // 4) for part, mark in parts)


def conversation(out: Path) -> tuple[list[Message], str]:
    row = pq.read_table(out).to_pylist()[0]
    messages = [
        Message(
            role=m["role"],
            content=m["content"],
            tool_calls=[
                ToolCall(name=c["function"]["name"], arguments=c["function"]["arguments"])
                for c in m["tool_calls"] or []
            ],
        )
        for m in row["messages"]
    ]
    assert [m["tool_call_id"] for m in row["messages"] if m["role"] == "tool"] == [
        row["messages"][2]["tool_calls"][0]["id"]
    ]
    return messages, row["tools"]


def test_a_task_gives_at_most_so_many_rows(run, tmp_path):
    out = tmp_path / "rows.parquet"
    done = export(run, out, "--per-task", "1")
    assert done.returncode == 0, done.stderr
    assert pq.read_table(out)["task_id"].to_pylist() == ["t0", "t1"]
    assert export(run, out, "--min-reward", "2").stderr.startswith(
        "error: no row is left to write: 0 of 6 episodes"
    )


def test_runs_whose_folders_have_one_name_keep_their_episodes_apart(run, config, tmp_path):
    other = RunDir(tmp_path / "demo-1" / run.root.name)
    other.make()
    create.publish(other, other, config, plan.Taken({}), "")
    archive.write(other.archive(0), archive.read(run.archive(0)), [0])
    found = collect(map(RunExport, (run.root, other.root)), 1.0, 0)
    assert {task: len(episodes) for task, episodes in found.rows.items()} == {"t0": 3, "t1": 2}


def test_episodes_of_other_tasks_than_those_of_a_file_are_left_out(run, tmp_path):
    rows, out = tmp_path / "teaching.jsonl", tmp_path / "rows.parquet"
    rows.write_text('{"task_id": "t1"}\n{"task_id": "t3"}\n')
    done = export(run, out, "--tasks", str(rows))
    assert done.returncode == 0, done.stderr
    assert pq.read_table(out)["task_id"].to_pylist() == ["t1"]


def test_of_an_evaluation_its_own_episodes_are_taken_and_else_no_held_out(run, config, tmp_path):
    (solved, *_) = archive.read(run.archive(0))
    attempt = Attempt(task_id="t0", index=0, sampling="greedy", sample=0, outcome="resolved", reward=1.0)
    told = [msgspec.structs.replace(attempt, record=msgspec.msgpack.encode(solved)), attempt]
    evals.write(run.eval_table("held_out"), told)
    assert len(list(RunExport(run.root).episodes())) == 6
    evaluated = RunDir(tmp_path / "evaluated")
    evaluated.make()
    decodings = {"greedy": Sampling(temperature=0.0)}
    only = msgspec.structs.replace(config, mode="eval", eval=EvalConfig(decodings=decodings))
    create.publish(evaluated, evaluated, only, plan.Taken({}), "")
    evals.write(evaluated.eval_table("eval"), told)
    assert list(RunExport(evaluated.root).episodes()) == [solved]
