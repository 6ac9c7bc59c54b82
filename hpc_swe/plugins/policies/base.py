"""The seam: the model being trained, on its ranks."""

from pathlib import Path
from typing import Protocol, runtime_checkable

from hpc_swe.plugins import Plugin
from hpc_swe.records import Batch, TensorInfo


class LossConfig(Plugin, frozen=True, kw_only=True):
    """The objective; see roles/learner/loss.py for the formulas."""

    objective: str = "sampler_ratio"
    """sampler_ratio, decoupled or sft."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    ratio_cap: float = 5.0
    """decoupled: largest weight pi_prox / mu."""
    mask_low: float = 0.0
    """decoupled: tokens with pi_prox / mu below are not trained; 0 is off."""
    mask_high: float = 0.0
    """decoupled: tokens with pi_prox / mu above are not trained; 0 is off."""
    kl_coefficient: float = 0.0
    """Weight of the KL to the reference, the initial weights."""


class OptimizerConfig(Plugin, frozen=True, kw_only=True):
    """AdamW as Megatron runs it."""

    lr: float = 1e-6
    warmup_steps: int = 0
    decay: str = "constant"
    """constant, or linear: over the last `decay_share` of `decay_steps`."""
    decay_steps: int = 0
    decay_share: float = 0.3
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0


class Learner(Protocol):
    """The policy on this rank, ready to train."""

    step: int
    """Optimizer steps taken."""

    def train(self, batch: Batch, loss: LossConfig) -> dict[str, float]:
        """One optimizer step; metrics are the same on every rank."""
        ...

    def logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of tokens 1 .. of one text."""
        ...

    def export(self, folder: Path) -> dict[str, TensorInfo]:
        """Write Hugging Face safetensors: every rank the tensors it owns. Returns those of this rank."""
        ...

    def save(self, folder: Path) -> None:
        """Write a distributed checkpoint into an empty folder."""
        ...

    def load(self, folder: Path) -> None:
        """Resume from a checkpoint, at any tensor-parallel size."""
        ...


@runtime_checkable
class Policy(Protocol):
    """The plugin."""

    tensor_parallel: int

    def build(self, model: Path, optimizer: OptimizerConfig, reference: bool) -> Learner:
        """Join the process group of this job and load the initial weights."""
        ...
