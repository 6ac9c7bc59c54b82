"""Measure steps of the learner on this rank: python -m hpc_swe.view.benchmarks.steps PLAN OUT.

`hpc_swe.benchmarks.learner` starts it once for each rank; rank 0 writes what all have found.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch

from hpc_swe.base import loader
from hpc_swe.cluster import gpus
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies.base import (
    Learner,
    LossConfig,
    OptimizerConfig,
    Policy,
)
from hpc_swe.roles.learner.loss import PolicyObjective
from hpc_swe.view.benchmarks.random_weights import RandomWeights
from hpc_swe.view.benchmarks.records import PARTS, Measured, Plan

REPEATS = 10
LONGEST_KERNELS = 15


def build_learner(plan: Plan, device: torch.device) -> Learner:
    """Build the learner; raise ConfigError where the policy cannot be built without files."""
    policy: Policy = loader.load("policies", plan.policy)
    shape, dtype = ModelShape.read(Path(plan.model)), getattr(torch, plan.policy["dtype"])
    tensors = RandomWeights(shape, dtype, device)
    return policy.build_from(Path(plan.model), OptimizerConfig(), tensors, sum(plan.workload.lengths))


def measure(plan: Plan) -> Measured:
    """Take the plan's steps on this rank, and return the figures of all ranks."""
    count = torch.cuda.device_count()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", gpus.of_rank(rank, count, os.environ)) if count else torch.device("cpu")
    product_flops = measure_product(device)
    learner, objective = build_learner(plan, device), PolicyObjective(LossConfig())
    ranks = learner.ranks

    def take(step: int) -> dict[str, float]:
        return learner.train(plan.workload.batch(step, ranks.data_rank, ranks.data_size), objective)

    first = take(0)
    for step in range(1, plan.warm):
        take(step)
    if count:
        torch.cuda.reset_peak_memory_stats()
    seconds, timed = [], []
    for step in range(plan.warm, plan.warm + plan.steps):
        ranks.gather(None)  # all start together
        start = time.perf_counter()
        timed.append(take(step))
        seconds.append(time.perf_counter() - start)
    peaks = ranks.gather(torch.cuda.max_memory_allocated() if count else 0)
    kernels = profile(lambda: take(plan.warm + plan.steps)) if plan.profile else ""
    learner.close()
    return Measured(
        device=torch.cuda.get_device_name(device) if count else "CPU",
        product_flops=product_flops,
        step_s=fmean(seconds),
        seconds={part: fmean(each[f"step_seconds/{part}"] for each in timed) for part in PARTS},
        data_ranks=ranks.data_size,
        recompute=learner.recompute,
        attention=learner.attention,
        peak_bytes=max(peaks),
        expert_load=max(each.get("policy/expert_load", 0.0) for each in timed),
        loss=first["policy/loss"],
        grad_norm=first["policy/grad_norm"],
        kernels=kernels,
    )


def measure_product(device: torch.device) -> float:
    """Return the FLOP/s of a product of two large square matrices, in bfloat16 on a GPU."""
    on_gpu = device.type == "cuda"
    width, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in "ab")

    def multiply() -> None:
        for _ in range(REPEATS):
            left @ right
        if on_gpu:
            torch.cuda.synchronize(device)

    multiply()
    start = time.perf_counter()
    multiply()
    return 2 * width**3 * REPEATS / (time.perf_counter() - start)


def profile(step: Callable[[], object]) -> str:
    """Run a step under torch's profiler, and return its table of the kernels that took longest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    on_gpu = torch.cuda.is_available()
    with torch_profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        step()
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    table: Any = profiler.key_averages().table(sort_by=order, row_limit=LONGEST_KERNELS)
    return str(table)


def main() -> None:
    """Read the plan, measure, and let rank 0 write the result."""
    found = measure(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan))
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
