"""The recorder on the real vLLM: what it kept is what the engine's weights say of those very tokens.

A random policy calls no tool, so qwen-code takes its first answer for the last, and mini-swe-agent explains
three times what a call looks like.
"""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.base.records import Endpoint, EndpointTable, ExitStatus, Message, RolloutRequest, Sampling
from hpc_swe.base.store import atomic
from hpc_swe.models.engines import _http
from hpc_swe.roles.rollout import episode
from hpc_swe.roles.rollout.endpoints import Endpoints
from hpc_swe.roles.rollout.sampler import Sampler
from tests.kit.engine_kit import CPU, TOKEN, require_exact, serving
from tests.kit.sessions_kit import CONTEXT, World, configured, overlay
from tests.kit.stage import V1, Rig, rig

pytestmark = pytest.mark.slow
LONG = msgspec.structs.replace(CPU, max_num_seqs=8)


@pytest.fixture(scope="module")
def url(long_model: Path) -> Iterator[str]:
    with serving(LONG, long_model, long_model.parent / "engine.log", V1, CONTEXT) as url:
        yield url


def connect(made: Rig, url: str, model: Path) -> Rig:
    """Give a rig the real engine and the model's tokenizer."""
    endpoint = Endpoint(owner="a", url=url, versions=[V1], updating=False)
    atomic.put(made.run.endpoints, EndpointTable(beat=1, endpoints=[endpoint], newest=V1))
    sampler = Sampler(LONG, Endpoints(made.run, 0), TOKEN, 180.0)
    made.means = dataclasses.replace(made.means, builder=TokenBuilder(model), sampler=sampler)
    return made


@pytest.fixture
def real(tmp_path: Path, long_model: Path, url: str) -> Rig:
    return connect(rig(tmp_path / "run", tmp_path / "toy", context=1000), url, long_model)


def test_the_real_engine_agrees_on_every_recorded_token(
    world: World, agent: str, url: str, tmp_path: Path
) -> None:
    config = configured(agent, overlay(world, [], tmp_path / "run.toml"), engine="vllm")
    (task,) = config.taskset.load("train")
    made = rig(tmp_path / "run", tmp_path / "toy", config.agent, config.sandbox)
    connected = connect(made, url, world.model).means
    means = dataclasses.replace(connected, tasks={task.task_id: task}, config=config.rollout)
    request = RolloutRequest(
        group_id=0, index=0, task_id=task.task_id, seed=0, sampling=Sampling(max_tokens=60)
    )
    recorder = means.recorder(request)
    played = episode.record(request, recorder, episode.play(means, request, recorder), "test")
    turns = played.turns
    begins = [number for number, turn in enumerate(turns) if turn.parent is None]
    # Qwen-code requests a truncated reply again, then has it continued.
    assert begins == [0] or (agent, begins) == ("qwen_code", [0, 1]), "one conversation"
    assert agent == "qwen_code" or len(turns) > 1
    assert all(turn.parent in (None, number - 1) for number, turn in enumerate(turns))
    assert len(turns[0].appended_ids) // 4 > 1000
    assert played.exit_status in (ExitStatus.SUBMITTED, ExitStatus.AGENT_ERROR), played.error
    assert all(turn.delivered for turn in turns)
    require_exact(LONG, url, turns, V1)


def test_a_generation_that_vllm_aborts_goes_on(real: Rig, url: str) -> None:
    request = RolloutRequest(group_id=0, index=0, task_id="t", seed=0, sampling=Sampling(max_tokens=900))
    recorder = real.means.recorder(request)
    ended = threading.Event()

    def disturb() -> None:
        while not ended.wait(0.2):
            _http.call(url, TOKEN, "/pause?mode=abort", b"{}", 30.0)
            _http.call(url, TOKEN, "/resume", b"{}", 30.0)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for number in range(6):
            recorder([Message(role="user", content=f"Number {number}.")])
    finally:
        ended.set()
        thread.join()
    assert recorder.counts["continued"] > 0
    for turn in recorder.close("over"):
        assert turn.finish_reason in ("stop", "length")
        require_exact(LONG, url, [turn], V1)
