"""One rank of a speed measurement: python policy_speed.py MODEL RECOMPUTE ATTENTION,...; see policy_smoke.py.

`even` packs are one sequence of half the tokens and two of a quarter each; `ragged` ones are twelve
sequences whose lengths differ in every step, as they do in training.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

PEAK = 989e12
"""Dense bfloat16 FLOP/s of an H200's datasheet."""
WARM, TIMED = {"even": 2, "ragged": 5}, 3
"""Steps; kernels plan for lengths that they have not seen, so ragged packs warm up longer."""


def main() -> None:
    import torch

    from hpc_swe.plugins.policies.base import LossConfig, OptimizerConfig
    from hpc_swe.plugins.policies.megatron import Megatron
    from hpc_swe.roles.learner.loss import PolicyObjective

    model, recompute, size = Path(sys.argv[1]), sys.argv[2], int(os.environ["WORLD_SIZE"])
    policy = Megatron(tensor_parallel=size, sequence_parallel=size > 1, recompute=recompute)
    learner = policy.build(model, OptimizerConfig(lr=1e-6), None)
    objective = PolicyObjective(LossConfig())
    shape = json.loads((model / "config.json").read_text())
    total = 32768 if torch.cuda.is_available() else 128
    for attention in sys.argv[3].split(","):
        choose(attention)
        for packs in ("even", "ragged"):
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            line = steps(learner, objective, shape, packs, total)
            peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0
            if learner.ranks.rank == 0:
                print(
                    f"TP={size} recompute {recompute:4} {attention:7} {packs:6} {line}, {peak:.1f} GiB",
                    flush=True,
                )
    if recompute == "none":
        for index in range(2):  # the first grows the machine's memory, too
            report_export(learner, model.parent / f"export{size}-{index}")
    learner.close()


def choose(attention: str) -> None:
    """Leave scaled_dot_product_attention the flash kernel, or its own choice."""
    import torch

    if attention == "flash":
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


def lengths(packs: str, total: int, seed: int) -> list[int]:
    if packs == "even":
        return [total // 2, total // 4, total // 4]
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, total), 11, replace=False))
    return np.diff([0, *cuts, total]).tolist()


def steps(learner, objective, shape: dict, packs: str, total: int) -> str:
    """Figures of the steps after the warm-up, and the seconds of the first."""
    seconds, parts, timed, first = 0.0, {}, [], 0.0
    for index in range(WARM[packs] + TIMED):
        pack = lengths(packs, total, learner.step)
        learner.ranks.gather(None)
        start = time.perf_counter()
        metrics = learner.train(batch(learner, shape["vocab_size"], pack), objective)
        first = first or time.perf_counter() - start
        if index >= WARM[packs]:
            seconds += time.perf_counter() - start
            timed.append(pack)
            for name in ("forward", "backward", "optimizer"):
                parts[name] = parts.get(name, 0.0) + metrics[f"step_seconds/{name}"]
    rate = sum(sum(pack) for pack in timed) / seconds / learner.ranks.size
    flops = sum(work(shape, pack) for pack in timed) / seconds / learner.ranks.size
    split = " ".join(f"{name} {1e3 * value / TIMED:.0f}" for name, value in parts.items())
    return (
        f"{1e3 * seconds / TIMED:5.0f} ms ({split}) {rate:6.0f} tok/s/GPU {flops / 1e12:4.0f} TF/s/GPU "
        f"= {100 * flops / PEAK:4.1f} %, first {first:.1f} s"
    )


def work(shape: dict, pack: list[int]) -> float:
    """FLOPs that the model needs: 6 a weight and token, embedding apart, and causal attention."""
    width, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    groups = shape["num_key_value_heads"] * shape["head_dim"]
    layer = width * (2 * heads + 2 * groups + 3 * shape["intermediate_size"])
    weights = shape["num_hidden_layers"] * layer + width * shape["vocab_size"]
    attention = shape["num_hidden_layers"] * sum(2 * heads * length**2 for length in pack)
    return 6.0 * weights * sum(pack) + 3.0 * attention


def batch(learner, vocabulary: int, pack: list[int]):
    from hpc_swe.records import Batch, MicroBatch, floats, ids

    rng, total = np.random.default_rng(learner.step), sum(pack)
    mask = np.ones(total, np.uint8)
    mask[np.cumsum([0, *pack[:-1]])] = 0
    micro = MicroBatch(
        token_ids=ids(rng.integers(0, vocabulary, total).astype("<i4")),
        mask=mask.tobytes(),
        logprobs=floats(np.full(total, -np.log(vocabulary), "<f4")),
        advantages=floats(rng.standard_normal(total).astype("<f4")),
        weights=floats(np.full(total, 1 / total, "<f4")),
        sequence_lengths=pack,
    )
    return Batch(step=learner.step, rank=0, microbatches=[micro])


def report_export(learner, folder: Path) -> None:
    if learner.ranks.rank == 0:
        folder.mkdir()
    learner.ranks.gather(None)
    start = time.perf_counter()
    learner.export(folder)
    seconds = time.perf_counter() - start
    if learner.ranks.rank == 0:
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9
        print(f"TP={learner.ranks.size} export of {size:.1f} GB: {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
