"""The recorder on the real vLLM: what it kept is what the engine's weights say of those very tokens."""

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hpc_swe.conversation import TokenBuilder
from hpc_swe.plugins.agents.tool_agent import ToolAgent
from hpc_swe.plugins.engines import _http
from hpc_swe.plugins.engines.vllm import Vllm
from hpc_swe.records import (
    Endpoint,
    EndpointTable,
    Message,
    RolloutRequest,
    Sampling,
    Turn,
    float_array,
    id_array,
)
from hpc_swe.roles.inference.child import Child
from hpc_swe.roles.inference.supervisor import free_port
from hpc_swe.roles.rollout.endpoints import Endpoints
from hpc_swe.roles.rollout.sampler import Sampler
from hpc_swe.store import atomic
from tests.kit.checkout import ROOT
from tests.kit.stage import V1, Company, company

pytestmark = pytest.mark.slow
TOKEN = "secret"
ENGINE = Vllm(
    max_model_len=1024,
    max_num_seqs=8,
    kv_cache_bytes=1 << 27,
    dtype="float32",
    enforce_eager=True,
    device="cpu",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run([sys.executable, "-m", "hpc_swe.demo.model", "--out", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    port = free_port("127.0.0.1", 0)
    found = f"http://127.0.0.1:{port}"
    log = model.parent / "engine.log"
    child = Child(ENGINE.command(model, "127.0.0.1", port, "test"), ENGINE.environment(TOKEN), log)
    try:
        until = time.monotonic() + 180
        while not ENGINE.is_healthy(found):
            child.require_alive()
            assert time.monotonic() < until, log.read_text()[-2000:]
            time.sleep(0.2)
        ENGINE.adopt(found, TOKEN, V1, None)
        yield found
    finally:
        child.stop()


@pytest.fixture
def real(tmp_path: Path, model: Path, url: str) -> Company:
    """The toy company with the real engine and the demo's model."""
    agent = ToolAgent(tools=("view", "submit"), max_turns=3, show_tools=True)
    made = company(tmp_path / "run", tmp_path / "toy", agent, context=1000)
    endpoint = Endpoint(owner="a", url=url, versions=[V1], updating=False)
    atomic.put(made.run.endpoints, EndpointTable(beat=1, endpoints=[endpoint], newest=V1))
    sampler = Sampler(ENGINE, Endpoints(made.run, 0), TOKEN, 60.0)
    made.means = dataclasses.replace(made.means, builder=TokenBuilder(model), sampler=sampler)
    return made


def require_exact(turns: list[Turn], url: str) -> None:
    """The engine, asked to score a whole chain, agrees on every sampled token."""
    chain: list[int] = []
    places: list[tuple[int, Turn]] = []
    for turn in turns:
        chain += id_array(turn.appended_ids).tolist()
        places.append((len(chain), turn))
        chain += turn.completion.tolist()
    scores = np.array([0.0, *ENGINE.score(url, TOKEN, chain)])
    for start, turn in places:
        length = len(turn.completion)
        np.testing.assert_allclose(scores[start : start + length], float_array(turn.logprobs), atol=1e-3)
        assert [(s.oldest, s.newest) for s in turn.spans] == [(V1, V1)] * len(turn.spans)
        assert (turn.spans[0].start, turn.spans[-1].end) == (0, length)


def test_episodes_hold_the_engines_own_tokens(real: Company, url: str) -> None:
    for index in range(4):
        request = RolloutRequest(
            group_id=0, index=index, task_id="t", seed=0, sampling=Sampling(max_tokens=60, temperature=1.0)
        )
        real.requests.put(request.name, request)
    real.drain()
    assert len(real.episodes) == 4
    for episode in real.episodes.values():
        assert [turn.parent for turn in episode.turns] == [None, 0, 1]
        require_exact(episode.turns, url)


def test_a_generation_that_vllm_aborts_goes_on(real: Company, url: str) -> None:
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
        require_exact([turn], url)
