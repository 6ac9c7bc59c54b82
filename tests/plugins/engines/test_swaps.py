"""Swaps of weights in the real vLLM, by architecture and by its number of workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hpc_swe.plugins.engines.base import Weights
from hpc_swe.records import WeightManifest, WeightVersion
from hpc_swe.store import folders
from tests.kit.engine_kit import CPU, SIZES, TOKEN, make_run, publish, serving
from tests.kit.random_model import save_random

pytestmark = pytest.mark.slow
TEXT = list(range(40, 90))
WIDE = SIZES | {"hidden_size": 128, "tie_word_embeddings": False}


def qwen2(folder: Path, seed: int) -> Path:
    """With biases that are not 0."""

    def change(name: str, parameter: Any) -> None:
        if name.endswith(".bias"):
            parameter.normal_(0, 0.2)

    return save_random(folder, "Qwen2", WIDE, seed, change)


def experts(folder: Path, seed: int) -> Path:
    """Eight, of which a token takes two; stored one by one, as a learner writes them."""

    def change(name: str, parameter: Any) -> None:
        if "experts" in name:
            parameter.normal_(0, 0.3)

    shape = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return save_random(folder, "Qwen3Moe", WIDE | shape | {"head_dim": 32}, seed, change)


def reference(model: Path) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(
            torch.tensor([TEXT])
        ).logits[0]
    return torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize(
    ("make", "workers"), [(qwen2, 2), (experts, 1)], ids=["qwen2, two workers", "experts"]
)
def test_what_a_swap_leaves_is_the_other_model(
    make: Callable[[Path, int], Path], workers: int, tmp_path: Path
) -> None:
    models = [make(tmp_path / str(seed), seed) for seed in (0, 1)]
    wanted = [reference(model) for model in models]
    assert np.abs(wanted[0] - wanted[1]).max() > 0.5
    engine, run = msgspec.structs.replace(CPU, tensor_parallel=workers), make_run(tmp_path / "run")
    with serving(engine, models[0], tmp_path / "engine.log") as url:
        assert engine.is_alive(url, TOKEN, 60.0)
        errors = [float(np.abs(np.asarray(engine.score(url, TOKEN, TEXT)) - wanted[0]).max())]
        for step, model in ((1, 1), (2, 0), (3, 1)):
            version = WeightVersion(step=step)
            folder = publish(run, models[model], version)
            manifest = folders.manifest(run.weight(version), WeightManifest)
            files = folders.verify(folder, manifest, lambda: False)
            engine.reload(url, TOKEN, Weights(version, folder, manifest, files))
            errors.append(float(np.abs(np.asarray(engine.score(url, TOKEN, TEXT)) - wanted[model]).max()))
        print(make.__name__, workers, "largest difference of a log-probability, start and swaps:", errors)
        assert max(errors) < 1e-3
