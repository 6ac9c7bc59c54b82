"""The real vLLM with speculation, against transformers: what it samples is what the model says."""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from hpc_swe.base.errors import NoAnswer
from hpc_swe.base.records import ProbeScore, Sampling
from hpc_swe.models.engines.base import Completion
from tests.kit.checkout import ROOT
from tests.kit.engine_kit import CPU, TOKEN, make_model, make_run, processes, serving
from tests.kit.waiting import until
from tests.models.engines.test_vllm import Server, deviations, reference, sample, swapped_midway

NUMBA = ROOT / ".cache/numba"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NUMBA.exists(), reason="tests/kit/install_packages.sh installs numba"),
]
NGRAM = msgspec.structs.replace(CPU, speculation="ngram")
MOTIF = np.random.default_rng(0).integers(10, 2000, 12).tolist()
TEXT = MOTIF * 8
"""Much repeated text."""


def make_sure_model(folder: Path, seed: int) -> Path:
    """A random model that is sure of some next tokens, so that its own text repeats itself."""
    make_model(folder, seed)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = 6 * tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def numba() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(NUMBA))
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, numba: None) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("vllm")
    models = {name: make_sure_model(root / name, seed) for name, seed in (("a", 0), ("b", 1))}
    with serving(NGRAM, models["a"], root / "engine.log") as url:
        yield Server(url, make_run(root / "run"), models, iter(range(1, 1000)))


def accepted(server: Server) -> int:
    """How many proposed tokens the engine has accepted."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=60).text
    [found] = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)$", text, re.MULTILINE)
    return int(float(found))


@pytest.fixture(autouse=True)
def proposals(server: Server) -> Iterator[None]:
    """Each test is about accepted proposals, so it must have some."""
    before = accepted(server)
    yield
    assert accepted(server) > before


def sample_all(server: Server, sampling: Sampling, count: int) -> list[tuple[list[int], Completion]]:
    prompts = [[*MOTIF[:shift], *TEXT] for shift in range(count)]
    with ThreadPoolExecutor(16) as pool:
        found = pool.map(lambda prompt: sample(server, prompt, sampling), prompts)
    return list(zip(prompts, found, strict=True))


def test_greedy_tokens_are_the_likeliest_ones(server: Server) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(server.models["a"])
    for prompt, found in sample_all(server, Sampling(temperature=0.0, max_tokens=80), 4):
        with torch.no_grad():
            best = model(torch.tensor([prompt + found.token_ids])).logits[0].argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == found.token_ids
        assert deviations(server, "a", prompt, found).max() < 1e-4


def test_tokens_are_sampled_from_the_models_distribution(server: Server) -> None:
    """Their log-probabilities are, on average, minus the entropies of the distributions they came from."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(server.models["a"])
    surprises = []
    for prompt, found in sample_all(server, Sampling(max_tokens=100), 12):
        assert deviations(server, "a", prompt, found).max() < 1e-4
        with torch.no_grad():
            logits = model(torch.tensor([prompt + found.token_ids])).logits[0, len(prompt) - 1 : -1]
        table = torch.log_softmax(logits, -1)
        entropies = -(table.exp() * table).sum(-1).numpy()
        surprises.append(-np.asarray(found.logprobs) - entropies)
    surprise = np.concatenate(surprises)
    assert abs(surprise.mean()) < 5 * surprise.std() / len(surprise) ** 0.5


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_a_swap_is_stamped_token_by_token(server: Server, kv: str) -> None:
    new, found = swapped_midway(server, msgspec.structs.replace(NGRAM, kv_on_update=kv))
    after = []
    for prompt, completion in found:
        assert completion.spans is not None
        (_, middle, _), (_, end, version) = completion.spans
        assert (end, version) == (len(completion.token_ids), new)
        assert deviations(server, "a", prompt, completion)[:middle].max() < 1e-3
        after.append(deviations(server, "b", prompt, completion)[middle:].max())
    assert max(after) < 1e-3 if kv == "recompute" else max(after) > 1e-2
    server.reload("a")


def test_a_probe_passes_and_fails_as_without_speculation(server: Server) -> None:
    wanted = reference(server.models["a"], TEXT[:1], TEXT[1:]).tolist()
    server.reload("a", probe=ProbeScore(token_ids=TEXT, logprobs=wanted, tolerance=1e-3))
    sample(server, TEXT, Sampling(temperature=0.0, max_tokens=80))


def test_requests_go_on_after_sleep(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(sample_all, server, Sampling(max_tokens=600), 4)
        NGRAM.sleep(server.url, TOKEN)
        NGRAM.wake(server.url, TOKEN)
        for prompt, found in asking.result():
            assert deviations(server, "a", prompt, found).max() < 1e-4


def test_a_killed_engine_fails_its_requests_and_the_next_one_goes_on(server: Server, tmp_path: Path) -> None:
    mark = f"TEST_MARK={tmp_path}"
    engine = msgspec.structs.replace(NGRAM, environ={"TEST_MARK": str(tmp_path)})
    begun = sample(server, TEXT, Sampling(max_tokens=100))
    with serving(engine, server.models["a"], tmp_path / "first.log") as url:
        dying = server._replace(url=url)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(sample, dying, TEXT, Sampling(max_tokens=1500))
            until(lambda: accepted(dying) > 0, "proposals are accepted")
            for pid in processes(mark):
                os.kill(pid, signal.SIGKILL)
            assert isinstance(asking.exception(), NoAnswer)
    prompt = TEXT + begun.token_ids
    rest = sample(server, prompt, Sampling(max_tokens=100))
    assert deviations(server, "a", prompt, rest).max() < 1e-4
