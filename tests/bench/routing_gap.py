"""The gap between learner and engine with and without routing replay, on a model with experts.

    python -m tests.bench.routing_gap

With CUDA the engine is vLLM, which returns the experts of each token; engine and learner are in bfloat16. No
vLLM returns them on a CPU: there transformers scores random tokens in bfloat16, and the learner is in
float32. Weights are random, so that routers decide narrowly, and differ more often than trained ones.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hpc_swe.plugins.engines.vllm import Vllm
from hpc_swe.records import FREE, MicroBatch, Sampling, floats, ids
from tests.kit.engine_kit import TOKEN, serving
from tests.kit.random_model import save_random
from tests.kit.ranks import gang, tiny

CUDA = torch.cuda.is_available()
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 1024 if CUDA else 128,
    "intermediate_size": 3072,
    "num_hidden_layers": 12 if CUDA else 3,
    "num_attention_heads": 16 if CUDA else 8,
    "num_key_value_heads": 8,
    "head_dim": 64 if CUDA else 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512 if CUDA else 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}
PROMPT, ANSWER, COUNT = (64, 256, 32) if CUDA else (16, 48, 4)
FIGURES = ("gap/mean", "gap/k3", "gap/p99", "gap/max", "gap/far_share", "ratio/effective_share")


def main() -> None:
    """Print one row a figure."""
    with tempfile.TemporaryDirectory() as name:
        for figure, replayed, free in measure(Path(name)):
            print(f"{figure:24} replayed {replayed:12.6f}   free {free:12.6f}")


def measure(folder: Path) -> list[tuple[str, float, float]]:
    """Figure, with replay, without."""
    model = save_random(folder / "model", "Qwen3Moe", SIZES)
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    sequences = list(_sampled_by_vllm(model, folder) if CUDA else _scored_by_transformers(model))
    case = {
        "name": "gap",
        "model": str(model),
        "policy": {"dtype": "bfloat16" if CUDA else "float32"},
        "packing": [[[index] for index in range(len(sequences))]],
        "data": tiny.write_sequences(folder / "sequences.msgpack", sequences),
        "do": [("evaluate", None)],
    }
    (found,) = gang.run_cases(1, [case], folder)["gap"]
    return [(name, found["replayed"][name], found["free"][name]) for name in FIGURES]


def _sampled_by_vllm(model: Path, folder: Path) -> Iterator[MicroBatch]:
    engine = Vllm(max_model_len=1024, gpu_memory_share=0.4, enforce_eager=True, return_routing=True)
    prompts = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (COUNT, PROMPT)).astype(np.int32)
    with serving(engine, model, folder / "engine.log") as url:
        for prompt in prompts:
            done = engine.generate(url, TOKEN, prompt, Sampling(max_tokens=ANSWER), 180.0)
            assert done.routing is not None
            tokens = np.concatenate((prompt, np.asarray(done.token_ids, np.int32)))
            yield _sequence(tokens, done.logprobs, done.routing.reshape(len(tokens) - 1, -1))


def _scored_by_transformers(model: Path) -> Iterator[MicroBatch]:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    chosen: list[torch.Tensor] = []
    for layer in network.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _gate, _given, found: chosen.append(found[2]))
    for seed in range(COUNT):
        tokens = np.random.default_rng(seed).integers(0, SIZES["vocab_size"], PROMPT + ANSWER)
        chosen.clear()
        with torch.no_grad():
            logprobs = tiny.score(network, torch.from_numpy(tokens)).tolist()
        routing = torch.stack(chosen, 1).flatten(1).numpy().astype(np.uint8)[:-1]
        yield _sequence(tokens.astype(np.int32), logprobs[PROMPT:], routing)


def _sequence(tokens: np.ndarray, logprobs: list[float], routing: np.ndarray) -> MicroBatch:
    mask = np.arange(len(tokens)) >= len(tokens) - len(logprobs)
    known = np.zeros(len(tokens), np.float32)
    known[mask] = logprobs
    return MicroBatch(
        token_ids=ids(tokens),
        mask=mask.astype(np.uint8).tobytes(),
        logprobs=floats(known),
        advantages=floats(mask.astype(np.float32)),
        weights=floats(mask.astype(np.float32)),
        sequence_lengths=[len(tokens)],
        routing=np.pad(routing, ((0, 1), (0, 0)), constant_values=FREE).tobytes(),
    )


if __name__ == "__main__":
    sys.exit(main())
