"""The real vLLM of somebody else: evaluated as it is, trained when it was started for that."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import ScoredEpisode, Turn, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, weights
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import control, watch
from hpc_swe.models.engines import _http
from hpc_swe.roles.coordinator import archive
from hpc_swe.roles.inference.supervisor import free_port
from hpc_swe.view import engine
from tests.kit.checkout import ROOT
from tests.kit.engine_kit import CPU, TOKEN

pytestmark = pytest.mark.slow
WORDS = [
    'sandbox={type="process"}',
    "max_restarts=1",
    "tasks.train=4",
    "tasks.eval=2",
    "policy.tensor_parallel=1",
    "groups.group_size=2",
    "groups.groups_per_step=2",
    "agent.max_turns=2",
    "sampling.max_tokens=20",
    "lease.ttl_s=20.0",
    "poll_s=0.1",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run([sys.executable, "-m", "hpc_swe.demo.model", "--out", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def key() -> Iterator[None]:
    os.environ["VLLM_API_KEY"] = TOKEN
    yield
    del os.environ["VLLM_API_KEY"]


def configured(model: Path, url: str, *words: str, files: tuple[str, ...] = ()) -> RunConfig:
    paths = [ROOT / "configs" / name for name in ("demo.toml", *files)]
    return configuration.read(*paths, overrides=[*WORDS, f"model={model}", f"inference.url={url}", *words])


def served(line: str, url: str, log: Path) -> Iterator[str]:
    """What somebody types into a shell of theirs."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line}"], stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 900
        while not CPU.is_healthy(url):
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def updatable(model: Path, tmp_path: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    yield from served(engine.line(configured(model, url)), url, tmp_path / "engine.log")


@pytest.fixture
def plain(model: Path, tmp_path: Path) -> Iterator[str]:
    """`vllm serve MODEL` and what a CPU needs; nothing of ours."""
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    environment = CPU.environment("none")
    settings = " ".join(f"{k}={v}" for k, v in environment.items() if k.startswith(("VLLM_CPU", "VLLM_EN")))
    line = (
        f"env {settings} TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 "
        f"{Path(sys.executable).with_name('vllm')} serve {model} --port {url.rpartition(':')[2]} "
        "--host 127.0.0.1 --max-model-len 512 --kv-cache-memory-bytes 134217728 --enforce-eager "
        f"--dtype float32 --max-num-seqs 8 --distributed-executor-backend uni --api-key {TOKEN}"
    )
    yield from served(line, url, tmp_path / "engine.log")


def turns(run: RunDir) -> list[Turn]:
    tables = [run.archives / name for name in atomic.names(run.archives)]
    episodes: list[ScoredEpisode] = [found for table in tables for found in archive.read(table)]
    assert all(found.score.outcome != "infra_error" for found in episodes)
    return [turn for found in episodes for turn in found.episode.turns]


def finish(run: RunDir, config: RunConfig) -> None:
    os.chdir(ROOT)
    os.umask(0o077)
    control.start(run, config)
    watch.watch(run, config, 1500, stop_on="error")


def test_a_plain_vllm_is_evaluated_as_it_is_and_never_trained(plain, model, tmp_path):
    with pytest.raises(ConfigError, match="no routes that update its weights"):
        control.start(RunDir(tmp_path / "refused"), configured(model, plain))
    config = configured(model, plain, "eval.samples=1", files=("demo_eval.toml",))
    run = RunDir(tmp_path / "eval")
    finish(run, config)
    assert atomic.names(run.evals)
    prompt = np.asarray([5, 6, 7], np.int32)
    found = CPU.generate(plain, TOKEN, prompt, config.eval.decodings["sampled"], 120.0)
    scores = CPU.score(plain, TOKEN, [5, 6, 7, *found.token_ids])
    assert np.abs(np.asarray(scores[2:]) - found.logprobs).max() < 1e-4
    assert CPU.is_healthy(plain)


def test_an_updatable_vllm_samples_what_the_learner_publishes(updatable, model, tmp_path):
    words = ["steps=3", "groups.resample=false", "eval.every=0", "groups.max_staleness=0"]
    config = configured(model, updatable, *words)
    run = RunDir(tmp_path / "train")
    finish(run, config)
    newest = weights.newest(run)
    assert newest is not None
    assert newest.step == 3
    steps = {span.fewest_steps for turn in turns(run) for span in turn.spans}
    assert 0 in steps  # a swap may end after the batch was begun that waits for the version
    assert {1, 2} & steps
    assert not run.logs("inference").exists()
    assert CPU.is_healthy(updatable)

    for route in ("/start_weight_update", "/pause?mode=keep"):  # so it is left by one that dies in an update
        _http.call(updatable, TOKEN, route, b"{}", 120.0)
    again = RunDir(tmp_path / "eval")  # of the model, though the engine still holds what was trained
    finish(again, configured(model, updatable, "eval.samples=1", files=("demo_eval.toml",)))
    prompt = np.asarray([5, 6, 7], np.int32)
    spans = CPU.generate(updatable, TOKEN, prompt, config.sampling, 120.0).spans
    assert spans is not None
    assert {version for _, _, version in spans} == {WeightVersion()}
