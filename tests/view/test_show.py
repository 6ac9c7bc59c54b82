"""What a person sees of a run: every file says something, and episodes can be read."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_swe.base import transcript
from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.metrics import Log
from hpc_swe.base.records import Message, Node, Sampling, ScoredEpisode, ToolCall
from hpc_swe.base.store import atomic
from hpc_swe.roles.coordinator.dispatch import request
from hpc_swe.roles.coordinator.modes.evaluation import Evaluating, Evaluator
from hpc_swe.view.exhibits import exhibit
from tests.kit.checkout import typed
from tests.kit.coordinator_kit import HELD_OUT, STEPS, finish, make_maintenance, result, rundir, save, work


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = rundir(tmp_path_factory.mktemp("show"))
    run.config.write_text('{"mode": "grpo"}')
    run.token.write_text("not-to-be-told")
    run.drain.touch()
    finish(run)
    maintenance = make_maintenance(run)
    evaluator = Evaluator(run, ("x", "y"), HELD_OUT, 5, Log(run.metric_log("c")))
    mode = Evaluating(run, evaluator, 2)
    mode.iterate(maintenance.snapshot())
    work(run, judge=lambda name: float(name.endswith("00")))
    mode.iterate(maintenance.snapshot())
    save(run, 1)
    Log(run.metric_log("learner-1")).write(3, {"reward/mean": 0.25, "own/curve": 1.0})
    with run.metric_log("learner-1").open("ab") as file:
        file.write(b'{"step": 4, "ti')
    atomic.put(run.node("a"), Node(owner="a", role="reward", beat=1, host="h", pid=1))
    (run.logs("reward")).mkdir(parents=True)
    (run.logs("reward") / "0_log.out").write_bytes(b"graded \x1b[2J\n")
    return run


def show(*words, code=0):
    done = typed("hpc_swe.show", *words)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def test_every_file_and_folder_of_a_run_says_something(run):
    paths = [run.root, *(p for p in run.root.rglob("*") if "/." not in str(p) and "cache" not in p.parts)]
    assert len(paths) > 40
    for path in paths:
        told = exhibit(path)
        assert told.strip(), path
        assert "not-to-be-told" not in told
        assert "\x1b" not in told


def test_a_metrics_log_is_its_curves_with_their_meanings(run):
    told = show(run.metric_log("learner-1"))
    assert "mean reward of all finished episodes" in told
    assert "1 lines cannot be read" in told


def test_folders_tell_what_they_hold_or_lack(run, tmp_path):
    assert ": 3 files" in show(run.batch(0)), "of two ranks, and the history"
    assert '"groups"' in show(run.batch(0))
    assert f"archived steps   {STEPS}" in show(run.root)
    assert "0 entries\n" in show(run.requests)
    assert "0 entries: neither run.json, as in a run, nor" in show(tmp_path)


def test_episodes_are_read_as_conversations(run):
    told = show(run.root, "--outcome", "unresolved", "--step", "0")
    assert told.count("--- submission") == told.count("| unresolved |") > 0
    assert "| resolved |" not in told
    assert "--- user\nmend it\n--- assistant\nd\u00f6ne\n>>> view\n    path: m.py\n" in told
    name = told.partition("train-")[2].partition(" ")[0]
    task = told.partition(f"train-{name} | ")[2].partition(" ")[0]
    assert f"| {task} |" in show(run.root, "--task", task, "--limit", "1")
    assert "no episode fits" in show(run.root, "--task", "nothing", code=1)


def test_episodes_of_an_evaluation_are_there_too(run):
    told = show(run.root, "--step", "eval", "--limit", "0")
    assert told.count("--- submission") == 8
    table = show(run.eval_table("eval"))
    assert "8 rows" in table
    assert "--task" in table
    assert show(run.eval_table("eval"), "--outcome", "resolved").count("--- submission") == 2


def test_damage_is_one_error(run, tmp_path):
    for name, data in (("a.parquet", b"x"), ("a.json", b"{"), ("a.safetensors", b"\xff" * 20)):
        (tmp_path / name).write_bytes(data)
        assert show(tmp_path / name, code=CorruptRecord.exit_code).startswith(f"error: {tmp_path / name}")
    assert "no such file or folder; name a run" in show(tmp_path / "absent", code=1)
    assert "no run" in show(tmp_path, "--outcome", "resolved", code=1)


@given(st.text(), st.text())
def test_nothing_that_a_policy_writes_moves_the_cursor(said, arguments):
    scored = result(request(1, "train", 0, 0, "t", Sampling()))
    calls = [ToolCall(name=said, arguments=arguments), ToolCall(name="x", arguments=json.dumps({said: said}))]
    messages = [Message(role="assistant", content=said, tool_calls=calls)]
    episode = msgspec.structs.replace(scored.episode, messages=messages)
    score = msgspec.structs.replace(scored.score, graded_as="train-000009-01")
    told = transcript.as_text(ScoredEpisode(episode=episode, score=score))
    assert "that of train-000009-01" in told
    assert not [c for c in told if c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160)]
    assert told.encode()
