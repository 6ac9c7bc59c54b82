"""Measure one column of the benchmark on this rank: python -m hpc_swe.view.benchmarks.column PLAN OUT.

`hpc_swe.benchmarks.learner` starts it once for each rank; rank 0 writes what all have found.
"""

import os
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import msgspec

from hpc_swe.base import loader
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Batch, Record
from hpc_swe.cluster import gpus
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies.base import (
    DescribedLearner,
    Learner,
    LossConfig,
    Objective,
    OptimizerConfig,
    PolicyOfTensors,
    Ranks,
    Tensors,
)
from hpc_swe.view.benchmarks.kernels import KernelTimes, profile
from hpc_swe.view.benchmarks.limits import measure_limits
from hpc_swe.view.benchmarks.peers import PEERS
from hpc_swe.view.benchmarks.workload import Workload

PARTS = ("forward", "backward", "optimizer")


class Plan(Record, frozen=True, kw_only=True):
    """A plan says what one column measures."""

    column: str
    model: str
    """Folder with a config.json; weights are random."""
    policy: dict[str, Any]
    """The table [policy]; peers take the precision from it."""
    workload: Workload
    warm: int
    """Steps before the first that is timed: kernels are chosen and compiled in them."""
    steps: int
    profile: bool
    """Whether one more step is taken, under the profiler."""


class Measured(Record, frozen=True, kw_only=True):
    """Hold the figures of one column."""

    step_s: float
    """Mean seconds of a step, by the clock of rank 0; all ranks end a step together."""
    seconds: dict[str, float]
    """Mean seconds of each of PARTS."""
    data_ranks: int
    recompute: str
    """What backward recomputes; "" where a trainer does not say."""
    attention: str
    """The kernels of attention; "" where a trainer does not say."""
    peak_bytes: int
    """Most bytes that tensors had on a GPU at one time, on the rank with most; 0 without a GPU."""
    expert_load: float
    """Tokens of the busiest rank in a layer of experts, as a multiple of the mean; 0 without experts."""
    loss: float
    """Of the first step."""
    grad_norm: float
    """Of the first step."""
    kernels: KernelTimes | None
    """Of rank 0; None without a profile."""


class Trainer(Protocol):
    """Take optimizer steps; our learner and the peers have this in common."""

    @property
    def ranks(self) -> Ranks:
        """Return the processes that train together."""

    def train(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Train on a batch, and return metrics as `Learner.train` does."""

    def close(self) -> None:
        """Leave the process group."""


def build(plan: Plan) -> Trainer:
    """Build the trainer of a column; raise ConfigError where the policy cannot be built without files."""
    if plan.column not in PEERS:
        return build_learner(plan)
    import torch

    from hpc_swe.view.benchmarks.fsdp2 import Fsdp2Trainer

    peer, dtype = PEERS[plan.column], getattr(torch, plan.policy["dtype"])
    return Fsdp2Trainer(peer, Path(plan.model), dtype, OptimizerConfig(), _tensors(plan))


def build_learner(plan: Plan) -> Learner:
    """Build our learner; raise ConfigError where the policy cannot be built without files."""
    policy = loader.load("policies", plan.policy)
    if not isinstance(policy, PolicyOfTensors):
        raise ConfigError(f"[policy] type = {plan.policy['type']!r} loads weights from files only")
    return policy.build_from(Path(plan.model), OptimizerConfig(), _tensors(plan), sum(plan.workload.lengths))


def _tensors(plan: Plan) -> Tensors:
    import torch

    from hpc_swe.view.benchmarks.random_weights import RandomWeights

    rank, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    device = torch.device("cuda", gpus.of_rank(rank, count, os.environ)) if count else torch.device("cpu")
    shape, dtype = ModelShape.read(Path(plan.model)), getattr(torch, plan.policy["dtype"])
    return RandomWeights(shape, dtype, device)


def measure(plan: Plan) -> Measured:
    """Take the plan's steps on this rank, and return the figures of all ranks."""
    import torch

    from hpc_swe.roles.learner.loss import PolicyObjective

    trainer, objective = build(plan), PolicyObjective(LossConfig())
    data_ranks = len(set(trainer.ranks.gather(trainer.ranks.data_rank)))

    def take(step: int) -> dict[str, float]:
        return trainer.train(plan.workload.batch(step, trainer.ranks.data_rank, data_ranks), objective)

    first = take(0)
    for step in range(1, plan.warm):
        take(step)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds, timed = [], []
    for step in range(plan.warm, plan.warm + plan.steps):
        trainer.ranks.gather(None)  # all start together
        start = time.perf_counter()
        timed.append(take(step))
        seconds.append(time.perf_counter() - start)
    peaks = trainer.ranks.gather(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
    kernels = profile(lambda: take(plan.warm + plan.steps)) if plan.profile else None
    trainer.close()
    return Measured(
        step_s=fmean(seconds),
        seconds={part: fmean(each[f"step_seconds/{part}"] for each in timed) for part in PARTS},
        data_ranks=data_ranks,
        recompute=trainer.recompute if isinstance(trainer, DescribedLearner) else "",
        attention=trainer.attention if isinstance(trainer, DescribedLearner) else "",
        peak_bytes=max(peaks),
        expert_load=max(each.get("policy/expert_load", 0.0) for each in timed),
        loss=first["policy/loss"],
        grad_norm=first["policy/grad_norm"],
        kernels=kernels,
    )


def main() -> None:
    """Read the plan, measure, and let rank 0 write the result."""
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
    if plan.column in PEERS:  # torch is not imported yet; without this, peers lose memory to fragments
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    result: Record = measure_limits() if plan.column == "limits" else measure(plan)
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
