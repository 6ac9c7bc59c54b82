"""The seam: the model being trained, on its ranks.

A policy knows parallelism, precision and files; what it minimizes is handed in as an `Objective`,
so that a new loss needs no new policy and a new policy no new loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, TypeVar, runtime_checkable

from msgspec import Meta

from hpc_swe.records import Batch, Record, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class LossConfig(Record, frozen=True, kw_only=True):
    """The objective; roles/learner/loss.py has the formulas."""

    objective: Literal["sampler_ratio", "decoupled", "sft"] = "sampler_ratio"
    """sampler_ratio and decoupled are policy gradients, sft is cross-entropy."""
    clip_low: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """The ratio is clipped below 1 less this."""
    clip_high: Annotated[float, Meta(ge=0)] = 0.28
    """The ratio is clipped above 1 plus this."""
    dual_clip: Annotated[float, Meta(gt=1)] = 3.0
    """Largest ratio at which a token of negative advantage, or the KL, still has its slope. Without such a
    bound one token that the learner sees otherwise than the engine outweighs the rest of a batch."""
    ratio_cap: Annotated[float, Meta(gt=0)] = 5.0
    """decoupled: largest weight pi_prox / mu."""
    mask_low: Annotated[float, Meta(ge=0)] = 0.0
    """decoupled: tokens with pi_prox / mu below are not trained; 0 is off."""
    mask_high: Annotated[float, Meta(ge=0)] = 0.0
    """decoupled: tokens with pi_prox / mu above are not trained; 0 is off."""
    kl_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the KL to the reference, the initial weights."""


class OptimizerConfig(Record, frozen=True, kw_only=True):
    """AdamW as Megatron runs it; vectors such as norms and biases do not decay."""

    lr: Annotated[float, Meta(ge=0)] = 1e-6
    """Learning rate after the warm-up."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Step n of the warm-up runs at n / warmup_steps of `lr`."""
    decay: Literal["constant", "linear"] = "constant"
    """linear: towards 0 over the last `decay_share` of `decay_steps`."""
    decay_steps: Annotated[int, Meta(ge=0)] = 0
    """0 is the run's `steps`; fewer than those are refused, since the rate is 0 after the last."""
    decay_share: Annotated[float, Meta(gt=0, le=1)] = 0.3
    """Share of `decay_steps` over which the rate falls."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    """Of matrices, decoupled from the gradient."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients."""
    eps: float = 1e-8
    """Added to the root of the second mean."""
    clip_grad: Annotated[float, Meta(ge=0)] = 1.0
    """Largest gradient norm; 0 is off."""


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of one microbatch, float32 [n] each, on the device of the policy."""

    logprobs: "Tensor"
    """Under the weights being trained; differentiable."""
    entropy: "Tensor"
    """Nats, of the distribution that the token was drawn from, under the weights being trained."""
    sampler: "Tensor"
    """Log-probabilities under the weights that sampled."""
    advantages: "Tensor"
    weights: "Tensor"
    reference: "Tensor | None"
    """Log-probabilities under the initial weights, if the objective needs them."""


class Objective(Protocol):
    """What a step minimizes, and what it reports."""

    needs_reference: bool

    def __call__(self, tokens: Tokens) -> tuple["Tensor", "Tensor", "Tensor"]:
        """Loss of a microbatch (scalar), sums [k] and maxima [m] of detached statistics.

        The policy adds losses and sums over microbatches and data-parallel ranks, takes the largest
        of the maxima, and divides nothing.
        """

    def metrics(self, sums: Sequence[float], maxima: Sequence[float]) -> dict[str, float]:
        """Named numbers from the statistics of the whole step."""


class Ranks(Protocol):
    """The processes that train together."""

    rank: int
    size: int
    data_rank: int
    """Which rank file of a batch this process consumes."""

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""

    def gather(self, value: T) -> list[T]:
        """Every rank's value in order of ranks, on every rank."""


class Learner(Protocol):
    """The policy on this rank, ready to train. Every method is called by all ranks together."""

    tensor_parallel: int
    vocabulary: int
    tolerance: float
    """Largest difference of a log-probability that rounding explains, for probes."""
    step: int
    """Optimizer steps taken."""

    @property
    def ranks(self) -> Ranks:
        """The processes that train together."""

    def train(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """One optimizer step; metrics are the same on every rank.

        Raises:
            FloatingPointError: Loss or gradient is not finite; this learner must not be used any more.
            ProtocolError: The batch is not for this rank, or trains a token that nothing precedes.
        """

    def logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of tokens 1 .. of one text."""

    def export(self, folder: Path) -> dict[str, TensorInfo]:
        """Write Hugging Face files into an empty folder, every rank its share; returns its tensors.

        Raises:
            StorageError: On this rank alone; nothing that comes later in here waits for it.
            FloatingPointError: On this rank alone: a tensor is not finite; names it.
        """

    def save(self, folder: Path) -> None:
        """Write a distributed checkpoint into an empty folder.

        Raises:
            StorageError: On all ranks.
        """

    def load(self, folder: Path) -> None:
        """Resume from a checkpoint, saved at any tensor-parallel size."""

    def close(self) -> None:
        """Leave the process group."""


@runtime_checkable
class Policy(Protocol):
    """The plugin."""

    tensor_parallel: int

    def build(self, model: Path, optimizer: OptimizerConfig, reference: Path | None) -> Learner:
        """Join the process group of this job and load the initial weights.

        With `reference`, a folder of the same architecture, those weights are kept for the KL.

        Raises:
            ConfigError: The model cannot be trained as configured.
        """
