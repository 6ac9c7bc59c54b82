"""The recorder on the real vLLM: what it kept is what the engine's weights say of those very tokens."""

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hpc_swe.benchmarks import watch
from hpc_swe.conversation import TokenBuilder
from hpc_swe.plugins.agents.tool_agent import ToolAgent
from hpc_swe.plugins.engines import _http
from hpc_swe.records import (
    Endpoint,
    EndpointTable,
    Message,
    RolloutRequest,
    Sampling,
)
from hpc_swe.roles.rollout.endpoints import Endpoints
from hpc_swe.roles.rollout.sampler import Sampler
from hpc_swe.store import atomic
from tests.kit.checkout import ROOT
from tests.kit.engine_kit import CPU, TOKEN, require_exact, serving
from tests.kit.stage import V1, Company, company
from tests.kit.waiting import until

pytestmark = pytest.mark.slow


ENGINE = msgspec.structs.replace(CPU, max_model_len=1024, max_num_seqs=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run([sys.executable, "-m", "hpc_swe.demo.model", "--out", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with serving(ENGINE, model, model.parent / "engine.log", V1) as url:
        yield url


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
        require_exact(ENGINE, url, episode.turns, V1)


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
        require_exact(ENGINE, url, [turn], V1)


def test_the_watch_counts_the_requests_of_an_engine(real: Company) -> None:
    real.run.token.write_text(TOKEN)
    (idle,) = watch.engines(real.run)
    assert (idle.engine, idle.requests) == ("a", 0)
    request = RolloutRequest(group_id=0, index=0, task_id="t", seed=0, sampling=Sampling(max_tokens=400))
    seen = threading.Event()

    def ask() -> None:
        while not seen.is_set():
            real.means.recorder(request)([Message(role="user", content="Count.")])

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        until(lambda: [look.requests for look in watch.engines(real.run)] == [1])
    finally:
        seen.set()
        thread.join()
