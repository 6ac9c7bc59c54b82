"""Swaps of weights in the real vLLM, by architecture and by its number of workers."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hpc_swe.records import WeightVersion
from hpc_swe.roles.inference.child import Child
from hpc_swe.roles.inference.supervisor import free_port
from hpc_swe.store import folders, weights
from tests.kit.engine_kit import CPU, EOS, TOKEN, VOCABULARY, make_run, publish

pytestmark = pytest.mark.slow
TEXT = list(range(40, 90))
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 1,
}


def qwen2(folder: Path, seed: int) -> Path:
    """With biases that are not 0."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(intermediate_size=128, **SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder


def experts(folder: Path, seed: int) -> Path:
    """Eight, of which a token takes two; stored one by one, as a learner writes them."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        head_dim=32,
        **SIZES,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


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
    engine, port = msgspec.structs.replace(CPU, tensor_parallel=workers), free_port("127.0.0.1", 0)
    url, run = f"http://127.0.0.1:{port}", make_run(tmp_path / "run")
    command = engine.command(models[0], "127.0.0.1", port, "test")
    child = Child(command, engine.environment(TOKEN), tmp_path / "engine.log")
    try:
        deadline = time.monotonic() + 900
        while not engine.is_healthy(url):
            child.require_alive()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert engine.is_alive(url, TOKEN, 60.0)
        errors = [float(np.abs(np.asarray(engine.score(url, TOKEN, TEXT)) - wanted[0]).max())]
        for step, model in ((1, 1), (2, 0), (3, 1)):
            version = WeightVersion(step=step)
            folder = publish(run, models[model], version)
            manifest = weights.manifest(run, version)
            engine.reload(url, TOKEN, folder, manifest, folders.verify(folder, manifest, lambda: False))
            errors.append(float(np.abs(np.asarray(engine.score(url, TOKEN, TEXT)) - wanted[model]).max()))
        print(make.__name__, workers, "largest difference of a log-probability, start and swaps:", errors)
        assert max(errors) < 1e-3
    finally:
        child.stop()
