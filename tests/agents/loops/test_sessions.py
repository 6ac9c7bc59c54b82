"""Real sessions of real agents: recorded token by token, graded, cut into samples, trained for one step."""

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.base.records import (
    Batch,
    BatchManifest,
    Episode,
    ExitStatus,
    RolloutRequest,
    Sampling,
    WeightManifest,
    float_array,
    id_array,
)
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import folders, weights
from hpc_swe.launch import control, watch
from hpc_swe.roles.coordinator import archive
from hpc_swe.roles.coordinator.batching.samples import trained_turns
from hpc_swe.roles.rollout import episode
from tests.kit.sessions_kit import ENVIRONMENT, World, call, configured, giving_up, overlay, script, solving
from tests.kit.stage import rig
from tests.kit.toy import gold

pytestmark = pytest.mark.slow


def trained(config, folder: Path, environment: pytest.MonkeyPatch) -> RunDir:
    """A run of one step, from the first request to the second version of the weights."""
    for name, value in ENVIRONMENT.items():
        environment.setenv(name, value)
    run = RunDir(folder)
    control.start(run, config)
    watch.watch(run, config, 900, stop_on="error")
    return run


def sequence(episode: Episode) -> list[int]:
    """All ids of the main chain, each turn's prompt and completion after its parent's."""
    return [
        int(i)
        for turn in episode.turns
        for part in (turn.appended_ids, turn.completion_ids)
        for i in id_array(part)
    ]


CONTEXTS = {"mini_swe_agent": ("bash", 8_000), "qwen_code": ("run_shell_command", 32_000)}


def test_a_full_context_ends_a_session_and_compression_is_its_own_chain(
    world: World, agent: str, tmp_path: Path
) -> None:
    """qwen-code answers a refusal by having its history summed up, and then gives up with exit code 0."""
    tool, context = CONTEXTS[agent]
    more = {"is_background": False} if agent == "qwen_code" else {}
    config = configured(agent, overlay(world, [], tmp_path / "run.toml"), engine="vllm")
    (task,) = config.taskset.load("train")
    replies = [call(tool, command="seq 1 20000", **more)] * 9
    made = rig(tmp_path / "run", tmp_path / "toy", config.agent, config.sandbox, replies, context=context)
    means = dataclasses.replace(made.means, tasks={task.task_id: task})
    request = RolloutRequest(
        group_id=0, index=0, task_id=task.task_id, seed=0, sampling=Sampling(max_tokens=500)
    )
    recorder = means.recorder(request)
    played = episode.record(request, recorder, episode.play(means, request, recorder), "test")
    assert played.exit_status == ExitStatus.CONTEXT, played.error
    assert "leave" in played.error
    main = trained_turns(played.turns, "main")  # more than one where a busy host cuts what a command printed
    assert main == [*range(len(main))]
    assert [turn.parent for turn in played.turns] == [None, *main[:-1]] + [None] * (agent == "qwen_code")
    assert played.messages[1].role == "user"
    assert played.counts["context_full"] == 1, "nothing is tried over and over"


def test_a_session_is_recorded_graded_and_trained(
    world: World, agent: str, tmp_path: Path, monkeypatch
) -> None:
    builder = TokenBuilder(world.model)
    replies = script(builder, solving(agent, "calc/core.py", "a - b", "a + b"), giving_up(agent))
    config = configured(agent, overlay(world, replies, tmp_path / "run.toml"))
    run = trained(config, tmp_path / "run", monkeypatch)

    found = sorted(archive.read(run.archive(0)), key=lambda scored: -len(scored.episode.turns))
    solved, other = (scored.episode for scored in found)
    assert [(s.score.outcome, s.score.reward) for s in found] == [("resolved", 1.0), ("no_submission", -1.0)]
    assert solved.exit_status == other.exit_status == ExitStatus.SUBMITTED
    assert solved.submission.splitlines()[-6:] == gold().splitlines()[-6:], (
        "nothing else of the agent is handed in"
    )

    # One conversation, in which each prompt is all that was said before and what came since.
    assert [turn.parent for turn in solved.turns] == [None, 0, 1, 2]
    assert [turn.completion.tolist() for turn in solved.turns] == [reply.token_ids for reply in replies[:4]]
    assert all(turn.delivered and turn.finish_reason == "stop" for turn in solved.turns)
    assert solved.counts["undelivered"] == solved.counts["parse_errors"] == 0
    ids = sequence(solved)
    assert builder.tokens.encode_whole(builder.tokens.decode(ids)) != ids, "the sampled tokens were kept"

    # One sample each, with the advantages of the two: +1 and -1.
    manifest = folders.manifest(run.batch(0), BatchManifest)
    data = folders.read(run.batch(0), run.rank_file(0), manifest)
    batch = msgspec.msgpack.decode(data, type=Batch)
    laid = {tuple(id_array(micro.token_ids).tolist()): micro for micro in batch.microbatches}
    text = [token for micro in laid for token in micro]
    for one, advantage in ((solved, 1.0), (other, -1.0)):
        assert any(
            sequence(one) == text[at : at + len(sequence(one))] for at in (0, len(text) - len(sequence(one)))
        )
        assert advantage in np.concatenate([float_array(micro.advantages) for micro in batch.microbatches])
    mask = np.concatenate([np.frombuffer(micro.mask, np.uint8) for micro in batch.microbatches])
    assert mask.sum() == sum(len(reply.token_ids) for reply in replies)

    first, last = (
        folders.manifest(run.weight(version), WeightManifest) for version in sorted(weights.published(run))
    )
    assert (first.version.step, last.version.step) == (0, 1)
    assert first.tensors.keys() == last.tensors.keys()
    assert first.tensors != last.tensors, "the step changed the weights"
