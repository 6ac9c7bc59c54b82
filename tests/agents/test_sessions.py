"""Real sessions of real agents: recorded token by token, graded, cut into samples, trained for one step."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from sessions_kit import ENVIRONMENT, World, configured, giving_up, overlay, script, solving
from toy import gold

from hpc_swe import launch
from hpc_swe.conversation import TokenBuilder
from hpc_swe.records import Batch, BatchManifest, Episode, ExitStatus, float_array, id_array
from hpc_swe.roles.coordinator import archive
from hpc_swe.rundir import RunDir
from hpc_swe.store import folders, weights

pytestmark = pytest.mark.slow


def trained(config, folder: Path, environment: pytest.MonkeyPatch) -> RunDir:
    """A run of one step, from the first request to the second version of the weights."""
    for name, value in ENVIRONMENT.items():
        environment.setenv(name, value)
    run = RunDir(folder)
    launch.start(run, config)
    launch.wait(run, config, 400)
    return run


def sequence(episode: Episode) -> list[int]:
    """All ids of the main chain, each turn's prompt and completion after its parent's."""
    return [
        int(i)
        for turn in episode.turns
        for part in (turn.appended_ids, turn.completion_ids)
        for i in id_array(part)
    ]


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
    for episode, advantage in ((solved, 1.0), (other, -1.0)):
        assert any(
            sequence(episode) == text[at : at + len(sequence(episode))]
            for at in (0, len(text) - len(sequence(episode)))
        )
        assert advantage in np.concatenate([float_array(micro.advantages) for micro in batch.microbatches])
    mask = np.concatenate([np.frombuffer(micro.mask, np.uint8) for micro in batch.microbatches])
    assert mask.sum() == sum(len(reply.token_ids) for reply in replies)

    first, last = (weights.manifest(run, version) for version in sorted(weights.published(run)))
    assert (first.version.step, last.version.step) == (0, 1)
    assert first.tensors.keys() == last.tensors.keys()
    assert first.tensors != last.tensors, "the step changed the weights"
