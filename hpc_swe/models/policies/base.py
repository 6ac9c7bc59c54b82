"""Define what a policy is: the model being trained, spread over the ranks of the learner.

A policy knows parallelism, precision and files. The loss is passed in as an `Objective`, so a new loss
needs no new policy and a new policy needs no new loss.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol, TypeVar

from msgspec import Meta

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Batch, Record, TensorInfo
from hpc_swe.models.builds import Builds
from hpc_swe.models.costs import MemoryEstimate, Part

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Carrier = Literal["full", "base", "delta"]
"""full: Hugging Face files. base: the same, and the values are kept, so that the next export may be a delta.
delta: only what changed since the last export, or since the initial model."""
Kept = Literal["initial model", "other reference", "last version"]
"""What a learner keeps beside its state: the model of the KL term, one of the first two; what the next delta
is to change."""


class LossConfig(Record, frozen=True, kw_only=True):
    """Select the objective and its bounds; roles/learner/objectives/ has the formulas."""

    objective: Literal["sampler_ratio", "decoupled", "sft", "gspo", "cispo"] = "sampler_ratio"
    """sft is cross-entropy; the others are policy gradients: sampler_ratio and decoupled clip each token,
    gspo clips whole sequences, and cispo clips the weight of each token."""
    clip_low: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """sampler_ratio, decoupled: the ratio of a token is clipped below 1 minus this."""
    clip_high: Annotated[float, Meta(ge=0)] = 0.28
    """sampler_ratio, decoupled: the ratio of a token is clipped above 1 plus this."""
    sequence_clip_low: Annotated[float, Meta(ge=0, le=1)] = 3e-4
    """gspo: the ratio of a sequence is clipped below 1 minus this. It must be larger than what rounding makes
    of a sequence whose weights did not change: see the metric ratio/sequence_spread."""
    sequence_clip_high: Annotated[float, Meta(ge=0)] = 4e-4
    """gspo: the ratio of a sequence is clipped above 1 plus this."""
    dual_clip: ClassVar[float] = 3.0  # that of the paper, see `ppo` in roles/learner/objectives/base.py
    ratio_cap: Annotated[float, Meta(gt=0)] = 5.0
    """decoupled: the weight pi_prox / mu is clipped above this; cispo: the weight pi / mu."""
    mask_shift: Annotated[float, Meta(ge=0)] = 0.0
    """Tokens whose probability has moved by more than this since they were sampled, in the direction of their
    advantage, are not trained (DPPO); 0 is off. cispo has no clip that would stop them before."""
    mask_sequence: Annotated[float, Meta(ge=0)] = 0.0
    """Sequences of negative advantage whose mean log mu - log pi is above this are not trained; 0 is off."""
    sampler_coefficient: Annotated[float, Meta(ge=0)] = 0.01
    """Weight of (log pi - log mu)^2, which pulls the weights back to those that sampled; 0 is off."""
    kl_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the KL divergence from the model of the key `reference`, by default the initial one."""
    entropy_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the entropy bonus."""


class OptimizerTable(Record, frozen=True, kw_only=True):
    """Set the parameters of AdamW as Megatron runs it; vectors such as norms and biases do not decay."""

    lr: Annotated[float, Meta(ge=0)] = 1e-6
    """Learning rate after the warm-up."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 10
    """Step n of the warm-up uses n / warmup_steps of `lr`, while the running means of AdamW are of few steps;
    0 is none."""
    decay_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Last share of `steps` over which the rate falls linearly towards 0, so that a run keeps its `steps`; 0
    keeps the rate constant."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    """Weight decay of matrices, decoupled from the gradient."""
    beta1: ClassVar[float] = 0.9  # decay rate of the running mean of gradients, as everywhere
    beta2: float = 0.98
    """Decay rate of the running mean of squared gradients."""
    eps: ClassVar[float] = 1e-8  # added to the root of the mean of squared gradients
    clip_grad: Annotated[float, Meta(ge=0)] = 1.0
    """Gradients are scaled down to at most this norm; 0 is off."""
    epochs: Annotated[int, Meta(ge=1)] = 1
    """Passes over each batch."""
    minibatches: Annotated[int, Meta(ge=1)] = 1
    """Optimizer steps of one pass, each on its share of the batch's episodes; at most one per episode. The
    coordinator divides them, and the batch says so."""


class OptimizerConfig(OptimizerTable, frozen=True, kw_only=True):
    """Hold the table, and what else a policy needs of the run."""

    steps: int = 0
    """Steps of the whole run, by which a decay ends."""


@dataclass(frozen=True)
class TrainedTokens:
    """Hold the trained tokens of one microbatch: float32 [n] each, on the device of the policy."""

    logprobs: "Tensor"
    """Log-probabilities under the weights being trained; differentiable."""
    entropy: "Tensor"
    """Entropy in nats of the distribution of each token under the weights being trained."""
    sampler: "Tensor"
    """Log-probabilities under the weights that sampled the tokens."""
    advantages: "Tensor"
    weights: "Tensor"
    reference: "Tensor | None"
    """Log-probabilities under the reference model; None when the objective does not need them."""
    proximal: "Tensor | None" = None
    """Log-probabilities under the weights before the batch; None if not needed, or the batch is one step."""
    sequence: "Tensor | None" = None
    """int64 [n], index of each token's sequence within the microbatch; None only where no objective asks."""
    sequences: int = 0
    """Number of sequences in the microbatch, with trained tokens or without."""


class Objective(Protocol):
    """Define the loss that a step minimizes, and the metrics that it reports."""

    needs_reference: bool
    needs_proximal: bool
    """Whether the weights before the batch matter when a batch has several optimizer steps."""

    def __call__(self, tokens: TrainedTokens) -> tuple["Tensor", "Tensor", "Tensor"]:
        """Return the loss of a microbatch (a scalar), and sums [k] and maxima [m] of detached statistics.

        The policy adds up losses and sums over microbatches and data-parallel ranks, takes the maximum of
        the maxima, and divides nothing.
        """

    def metrics(self, sums: Sequence[float], maxima: Sequence[float]) -> dict[str, float]:
        """Return metrics by name, computed from the statistics of the whole step."""


class Ranks(Protocol):
    """Connect the processes that train together."""

    rank: int
    size: int
    data_rank: int
    """Index of the batch's rank file that this process consumes."""
    data_size: int
    """Number of rank files of a batch; ranks with the same `data_rank` consume the same one."""

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on every rank."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order of ranks, on every rank."""


class ExportingLearner(Protocol):
    """Score with a rank's part of the policy, and export it. All ranks must call every method together."""

    vocabulary: int
    tolerance: float
    """Difference of log-probabilities that rounding explains. At most one of ten tokens of a probe may
    differ by more, and none by more than ten times as much."""
    step: int
    """Batches trained."""
    deltas_of_model: bool
    """Whether a delta changes the initial model, as adapters do, and not the version before it."""

    @property
    def ranks(self) -> Ranks:
        """Return the processes that train together."""

    def logprobs(self, token_ids: list[int]) -> list[float]:
        """Return the log-probabilities of one sequence's tokens, without its first token."""

    def export(self, folder: Path, carrier: Carrier = "full") -> dict[str, TensorInfo]:
        """Write this rank's share of the weights into an empty folder; describe the tensors of its share.

        A delta needs that the last export of this process was a base or a delta, which is its parent, unless
        deltas change the initial model.
        Raise StorageError on this rank alone, for which the others do not wait in this method; and on every
        rank FloatingPointError, which names a tensor of any rank that is not finite.
        """

    def close(self) -> None:
        """Leave the process group."""


class Learner(ExportingLearner, Protocol):
    """Train the part of the policy that this rank holds. All ranks must call every method together."""

    tensor_parallel: int

    @property
    def recompute(self) -> str:
        """Return its value of `policy.recompute`; what it chose, where that is "auto"."""

    @property
    def attention(self) -> str:
        """Return the kernels of attention."""

    def train(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Train on a batch, and return its metrics, which are the same on every rank.

        An optimizer step whose gradient is not finite is left out; ``policy/skipped`` counts these. Raise
        ProtocolError if the batch is not for this rank, or trains the first token of a sequence.
        """

    def evaluate(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Return the loss and the metrics of a batch under the current weights, without a step.

        They are the same on every rank. The objective may need no reference. Raise ProtocolError if the
        batch trains the first token of a sequence.
        """

    def save(self, folder: Path) -> None:
        """Write a distributed checkpoint into an empty folder; raise StorageError on all ranks."""

    def load(self, folder: Path) -> None:
        """Resume from a checkpoint, which may have been saved at another tensor-parallel size."""

    def release_memory(self) -> float | None:
        """Move everything from the GPU to host memory; until `restore_memory` nothing else may be called.

        Return how many GiB of this rank's GPU all processes then use; None where that is unknown. Raise
        NodeError where the host has no room.
        """

    def restore_memory(self) -> float | None:
        """Undo `release_memory`; return how many GiB of this rank's GPU all processes used before it.

        Raise NodeError, perhaps on this rank alone, where they leave too little.
        """


WRITERS = 8
"""Files of a checkpoint that each rank writes at most, by as many threads, side by side."""


class Tensors(Protocol):
    """Look up the tensors of a Hugging Face model."""

    def __getitem__(self, name: str) -> "Tensor":
        """Return a whole tensor by its name in Hugging Face's files; raise ConfigError if there is none."""

    def __contains__(self, name: object) -> bool:
        """Return whether there is such a tensor."""


class Policy(ABC):
    """Build the learner of this process."""

    @property
    @abstractmethod
    def processes(self) -> int:
        """Return how many processes hold one copy of the model."""

    @abstractmethod
    def build(
        self,
        model: Path,
        optimizer: OptimizerConfig,
        reference: Path | None,
        tokens: int = 0,
        kept: Sequence[Kept] = (),
    ) -> Learner:
        """Join the process group of this job and load the weights in `model`, a Hugging Face folder.

        The weights in `reference`, a folder of the same architecture, are kept for the KL divergence. No
        microbatch has more than `tokens` tokens; 0 is unknown. `kept` is what the learner must have room for
        beside its state. Raise ConfigError when the model cannot be trained as configured.
        """

    @property
    def gpus(self) -> int | None:
        """Return how many GPUs each process computes on; None where that is unknown."""
        return None

    @property
    def why_no_deltas(self) -> str:
        """Name the keys that rule out deltas as weight versions, and a remedy; "" when they are possible."""
        return ""

    def check_model(self, model: Path, data_parallel: int) -> None:  # noqa: B027
        """Raise ConfigError with the key unless so many copies of the model can be trained as configured."""

    def memory(
        self, model: Path, data_parallel: int, tokens: int, kept: Sequence[Kept] = ()
    ) -> MemoryEstimate | None:
        """Estimate the memory of one rank for microbatches of `tokens` tokens and `kept`; None if unknown."""
        return None

    def files(self, model: Path) -> tuple[Part, Part] | None:
        """Return the size of one exported version of the weights and of one checkpoint; None if unknown."""
        return None

    def build_problem(self, found: Builds) -> str:
        """Say why these builds cannot compute on the configured device, and the remedy; empty if they can."""
        return ""

    def build_from(
        self, model: Path, optimizer: OptimizerConfig, tensors: Tensors, tokens: int = 0
    ) -> Learner:
        """Build the learner as `build` does, for benchmarks: with weights from `tensors`, and no reference.

        `model` has a config.json. The learner can train; it need not be able to export.
        """
        raise ConfigError(f"[policy] {type(self).__name__} loads weights from files only")
