"""Sessions against the real vLLM: what was recorded is what its weights say of those very tokens.

A random policy calls no tool, so qwen-code takes its first answer for the last, and mini-swe-agent explains
three times what a call looks like.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hpc_swe.conversation import TokenBuilder
from hpc_swe.records import Endpoint, EndpointTable, ExitStatus, RolloutRequest, Sampling
from hpc_swe.roles.rollout import episode
from hpc_swe.roles.rollout.endpoints import Endpoints
from hpc_swe.roles.rollout.sampler import Sampler
from hpc_swe.store import atomic
from tests.kit.engine_kit import CPU, TOKEN, require_exact, serving
from tests.kit.sessions_kit import CONTEXT, World, configured, overlay
from tests.kit.stage import V1, company

pytestmark = pytest.mark.slow
LONG = msgspec.structs.replace(CPU, max_model_len=CONTEXT, max_num_seqs=8)


@pytest.fixture(scope="module")
def url(long_model: Path) -> Iterator[str]:
    with serving(LONG, long_model, long_model.parent / "engine.log", V1) as url:
        yield url


def test_the_real_engine_agrees_on_every_recorded_token(
    world: World, agent: str, url: str, tmp_path: Path
) -> None:
    config = configured(agent, overlay(world, [], tmp_path / "run.toml"), engine="vllm")
    (task,) = config.taskset.load("train")
    made = company(tmp_path / "run", tmp_path / "toy", config.agent, config.sandbox)
    endpoint = Endpoint(owner="a", url=url, versions=[V1], updating=False)
    atomic.put(made.run.endpoints, EndpointTable(beat=1, endpoints=[endpoint], newest=V1))
    means = dataclasses.replace(
        made.means,
        tasks={task.task_id: task},
        builder=TokenBuilder(world.model),
        sampler=Sampler(LONG, Endpoints(made.run, 0), TOKEN, 180.0),
        config=config.rollout,
    )
    request = RolloutRequest(
        group_id=0, index=0, task_id=task.task_id, seed=0, sampling=Sampling(max_tokens=60)
    )
    recorder = means.recorder(request)
    played = episode.record(request, recorder, episode.play(means, request, recorder), "test")
    turns = played.turns
    parents = [turn.parent for turn in turns]
    if agent == "qwen_code" and len(turns) > 1:  # it requests a truncated reply again, then has it continued
        assert parents == [None, None, *range(1, len(turns) - 1)]
    else:
        assert parents == ([None] if agent == "qwen_code" else [None, 0, 1]), "one conversation"
    assert len(turns[0].appended_ids) // 4 > 1000
    assert played.exit_status == (ExitStatus.SUBMITTED if agent == "qwen_code" else ExitStatus.AGENT_ERROR)
    assert all(turn.delivered for turn in turns)
    require_exact(LONG, url, turns, V1)
