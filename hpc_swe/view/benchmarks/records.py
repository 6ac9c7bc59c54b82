"""Say what the learner's benchmark measures, and what it has found."""

from typing import Any

from hpc_swe.base.records import Record
from hpc_swe.view.benchmarks.workload import Workload

PARTS = ("forward", "backward", "optimizer")


class Plan(Record, frozen=True, kw_only=True):
    """A plan says which steps are measured."""

    model: str
    """Folder with a config.json; weights are random."""
    policy: dict[str, Any]
    """The table [policy]."""
    workload: Workload
    warm: int
    """Steps before the first that is timed: kernels are chosen and compiled in them."""
    steps: int
    profile: bool
    """Whether one more step is taken, under the profiler."""


class Measured(Record, frozen=True, kw_only=True):
    """Hold the figures of the steps."""

    device: str
    """Name of rank 0's GPU, as torch reports it."""
    product_flops: float
    """FLOP/s of a product of two large matrices, which no step can surpass."""
    step_s: float
    """Mean seconds of a step, by the clock of rank 0; all ranks end a step together."""
    seconds: dict[str, float]
    """Mean seconds of each of PARTS."""
    data_ranks: int
    recompute: str
    """What backward recomputes; "" where a learner does not say."""
    attention: str
    """The kernels of attention; "" where a learner does not say."""
    peak_bytes: int
    """Most bytes that tensors had on a GPU at one time, on the rank with most; 0 without a GPU."""
    expert_load: float
    """Tokens of the busiest rank in a layer of experts, as a multiple of the mean; 0 without experts."""
    loss: float
    """Of the first step."""
    grad_norm: float
    """Of the first step."""
    kernels: str
    """torch's table of the kernels of rank 0; "" without a profile."""
