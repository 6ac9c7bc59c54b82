"""The real vLLM with weights in FP8, which it quantizes anew for each version of a learner in bfloat16."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from hpc_swe.base.errors import ConfigError, EngineError
from hpc_swe.base.records import ProbeScore, WeightVersion
from hpc_swe.models.engines.base import Weights
from hpc_swe.models.engines.vllm import Vllm
from tests.kit.engine_kit import CPU, SIZES, TOKEN, make_run, publish, publish_delta, serving, verified
from tests.kit.random_model import save_random

pytestmark = pytest.mark.slow
FP8 = msgspec.structs.replace(CPU, dtype="fp8_e4m3")
TEXT = list(range(40, 140))


class Served(NamedTuple):
    url: str
    log: Path

    def load(self, weights: Weights) -> None:
        FP8.reload(self.url, TOKEN, weights)

    def state(self) -> tuple[str, list[float]]:
        """The digest of what is in memory, and what it computes."""
        digests = re.findall(r"whose digest is (\w+)", self.log.read_text())
        return digests[-1], FP8.score(self.url, TOKEN, TEXT)


def reference(model: Path) -> np.ndarray:
    with torch.no_grad():
        logits = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.bfloat16)(torch.tensor([TEXT])).logits[0]
    table = torch.log_softmax(logits.float(), -1)[:-1]
    return table.gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two random models, and the second one with some of its values changed."""
    root, shape = tmp_path_factory.mktemp("models"), SIZES | {"head_dim": 32, "tie_word_embeddings": True}
    found = {
        name: save_random(root / name, "Qwen3", shape, seed, dtype="bfloat16")
        for seed, name in enumerate(("old", "new", "next"))
    }
    tensors = {name: tensor.clone() for name, tensor in load_file(found["new"] / "model.safetensors").items()}
    for name, tensor in tensors.items():
        tensor.view(-1)[:: 1 if "norm" in name else 7] *= 1.5
    save_file(tensors, found["next"] / "model.safetensors", metadata={"format": "pt"})
    return found


@pytest.fixture(scope="module")
def served(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    """An engine that began with the first model, and one that began with the last."""
    root = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack:
        logs = {name: root / f"{name}.log" for name in ("old", "next")}
        yield [Served(stack.enter_context(serving(FP8, models[n], log)), log) for n, log in logs.items()]


def test_each_version_is_quantized_as_an_engine_that_begins_with_it_would(
    models: dict[str, Path], served: list[Served], tmp_path: Path
) -> None:
    """Bit for bit: full versions, deltas first and later, a refused one, and one that fails its probe."""
    run, (engine, fresh) = make_run(tmp_path / "run"), served
    steps = [WeightVersion(step=step) for step in range(6)]
    opened = fresh.state()
    publish(run, models["new"], steps[1])
    full = verified(run, steps[1])
    delta = publish_delta(run, (models["new"], models["next"]), steps[2], full)
    engine.load(delta)
    assert engine.state() == opened
    engine.load(full)
    new = engine.state()
    engine.load(delta)
    assert engine.state() == opened
    assert new[0] != opened[0]
    fresh.load(full)
    assert fresh.state() == new

    wrong = publish_delta(run, (models["new"], models["next"]), steps[3], delta)
    with pytest.raises(EngineError, match="its digest is not the manifest's"):
        engine.load(wrong)
    assert engine.state() == opened
    probe = ProbeScore(token_ids=TEXT, logprobs=reference(models["next"]).tolist(), tolerance=0.25)
    publish(run, models["next"], steps[4], probe=probe)
    engine.load(verified(run, steps[4]))
    publish(run, models["old"], steps[5], probe=probe)
    with pytest.raises(EngineError, match="differ from the learner's by"):
        engine.load(verified(run, steps[5]))
    assert engine.state() == opened, "it is back at the version before"


def test_quantized_weights_compute_nearly_what_the_learner_computes(
    models: dict[str, Path], served: list[Served]
) -> None:
    scores = np.asarray(served[0].state()[1])
    near, far = (np.abs(scores - reference(models[name])).mean() for name in ("next", "new"))
    assert near < 0.2 < far


def test_a_model_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
    model = save_random(tmp_path / "experts", "Qwen3Moe", sizes)
    with pytest.raises(ConfigError, match=r"dtype = 'fp8_e4m3' needs a model without experts"):
        FP8.check_model(model, 64)


def test_keys_with_biases_are_not_rounded(tmp_path: Path) -> None:
    model = save_random(tmp_path / "biases", "Qwen2", SIZES)
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype = 'fp8_e4m3' needs a model whose keys have no biases"
    ):
        msgspec.structs.replace(CPU, kv_cache_dtype="fp8_e4m3").check_model(model, 64)


@pytest.mark.parametrize("words", ["--quant fp8", "-qfp8", "--dtype=float16", "--kv_cache_dtype fp8"])
def test_numbers_that_are_rounded_otherwise_are_refused_by_name(words: str) -> None:
    with pytest.raises(ConfigError, match=r"\[engine.extra\] has .* write engine.dtype"):
        Vllm(extra=words.split())
