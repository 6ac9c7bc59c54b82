"""Define the keys of the megatron policy.

They have a module of their own, without torch, because the plugin and the code that it loads both need them.
"""

from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.loader import Plugin
from hpc_swe.models.builds import Builds, missing_remedy, torch_problem
from hpc_swe.models.model_shape import ModelShape


class MegatronSettings(Plugin, frozen=True, kw_only=True):
    """Hold the table [policy] type = "megatron"."""

    tensor_parallel: Annotated[int, Meta(gt=0)] = 1
    """Number of processes that share each layer; groups of them train on different data."""
    pipeline_parallel: Annotated[int, Meta(gt=0)] = 1
    """Number of stages, of equally many layers, which microbatches pass one after another. A step should have
    several times as many microbatches as stages."""
    context_parallel: Annotated[int, Meta(gt=0)] = 1
    """Number of groups of processes that share the tokens of each microbatch, for long contexts. Attention
    divides its heads among them: this times `tensor_parallel` must divide the heads of keys and values."""
    expert_parallel: Annotated[int, Meta(gt=0)] = 1
    """Number of parts into which the experts of each layer are divided; above 1 no expert is split. It adds
    no processes: it divides those that tensor, context and data parallelism give."""
    device: Literal["gpu", "cpu"] = "gpu"
    """gpu: each process needs one GPU, and the learner refuses to start with fewer. cpu: GPUs are ignored."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of parameters and activations. Gradients are summed, and bfloat16 parameters updated, in float32."""
    offload_optimizer: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the optimizer's state, of 12 bytes for each bfloat16 parameter, that is kept in pinned host
    memory. Each step passes it through the GPU, in both directions of the bus at once, which takes about two
    seconds for 100 GB. The results are the same, bit for bit."""
    recompute: Literal["none", "elementwise", "products", "full", "auto"] = "auto"
    """What backward recomputes. none: nothing. elementwise: norms, rotary positions and SwiGLU, which costs
    hardly any time, and no matrix product. products: all but the core of attention and the layers' inputs.
    full: all but the layers' inputs. auto: the learner chooses the fastest of these that fits, by its
    estimate for `batches.microbatch_tokens` and the free memory of its GPUs when it starts, and logs it; on a
    CPU none. `launch start --dry-run` says what it will choose."""
    logprob_chunk: ClassVar[int] = 2048  # tokens whose logits exist at one time
    deterministic: bool = False
    """Repeat a step bit for bit on the same GPUs and in the same layout. It takes kernels that add in a fixed
    order. flash-attn-4 has such ones that are as fast for one sequence of 16,384 tokens, and take up to 1.2
    times as long for many short ones and at 65,536. Without that package attention of long sequences takes
    about 2.6 times as long. A CPU repeats its steps in any case."""
    lora_rank: Annotated[int, Meta(ge=0)] = 0
    """Above 0 only low-rank adapters of this rank are trained, and the weights of `model` stay as they are.
    0 trains all weights."""
    lora_alpha: Annotated[int, Meta(gt=0)] = 32
    """With `lora_rank`: the product of the adapters counts lora_alpha / lora_rank times."""
    lora_layers: Literal["all", "attention", "mlp"] = "all"
    """With `lora_rank`: which linear layers have adapters. all: those of attention, or delta nets in its
    place, and of the MLPs or of each expert."""
    delta_base: Literal["host", "gpu"] = "host"
    """Where the values of the last published version are kept when `learner.snapshot_every` > 1: in pinned
    memory of the host, or on the GPU, which is faster. They take two bytes for each bfloat16 parameter of a
    rank's share."""

    def __post_init__(self) -> None:
        if self.lora_rank and self.pipeline_parallel > 1:
            raise ConfigError(f"[policy] lora_rank = {self.lora_rank} needs pipeline_parallel = 1")

    @property
    def gpus(self) -> int:
        """Return how many GPUs each process computes on."""
        return int(self.device == "gpu")

    @property
    def processes(self) -> int:
        """Return how many processes hold one copy of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def why_no_deltas(self) -> str:
        if self.lora_rank and self.dtype == "float32":
            return (
                f'policy.lora_rank = {self.lora_rank} with policy.dtype = "float32": engines could merge the '
                'adapters to other last bits than the learner; set policy.dtype = "bfloat16"'
            )
        return ""

    def build_problem(self, found: Builds) -> str:
        return torch_problem("policy.device", found) if self.gpus else ""

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError, naming the setting and the size, if the model cannot be divided like this."""
        if self.expert_parallel > 1 and not shape.experts:
            raise ConfigError(
                f"[policy] expert_parallel = {self.expert_parallel}, but the model has no experts"
            )
        self._check_adapters(shape)
        self._check_delta_nets(shape)
        tensor, heads = self.tensor_parallel, self.tensor_parallel * self.context_parallel
        of_ffn = 1 if self.expert_parallel > 1 else tensor  # experts that are divided stay whole
        of_heads = "tensor_parallel * context_parallel" if self.context_parallel > 1 else "tensor_parallel"
        rules = [
            (of_heads, heads, "heads", shape.heads),
            (of_heads, heads, "groups", shape.groups),
            ("tensor_parallel", of_ffn, "ffn", shape.ffn),
            ("tensor_parallel", tensor, "shared_expert_intermediate_size", shape.shared_ffn),
            ("tensor_parallel", tensor, "linear_num_key_heads", shape.delta.key_heads if shape.delta else 0),
            ("tensor_parallel", tensor, "vocab", shape.vocab),
            ("pipeline_parallel", self.pipeline_parallel, "layers", shape.layers),
            ("expert_parallel", self.expert_parallel, "experts", shape.experts),
        ]
        for key, parts, name, size in rules:
            if size % parts:
                raise ConfigError(f"[policy] {key} = {parts} does not divide the model's {name}, {size}")

    def _check_delta_nets(self, shape: ModelShape) -> None:
        found = {
            "pipeline_parallel": self.pipeline_parallel > 1,
            "context_parallel": self.context_parallel > 1,
            "deterministic": self.deterministic and self.device == "gpu",
        }
        if shape.delta and (keys := ", ".join(key for key, is_set in found.items() if is_set)):
            raise ConfigError(
                f"[policy] {keys}: not supported for a model with gated delta nets (layer_types of its "
                "config.json), which trains in tensor, sequence and data parallelism"
            )
        if shape.delta and self.device == "gpu" and self.dtype == "bfloat16" and not find_spec("fla"):
            install = "install it (pip install --no-deps fla-core==0.6.0)"
            raise ConfigError(
                "[policy] a model with gated delta nets (layer_types of its config.json) needs the package "
                f'fla-core on GPUs; {missing_remedy("gpu", install)}, or set device = "cpu"'
            )

    def _check_adapters(self, shape: ModelShape) -> None:
        rank, narrow = self.lora_rank, min(shape.hidden, shape.ffn)
        if self.lora_layers != "mlp":
            narrow = min(
                narrow, shape.groups * shape.head_dim, *([shape.delta.values] if shape.delta else [])
            )
        step = 8 if self.dtype == "bfloat16" else 4
        if rank % step and shape.experts and self.lora_layers != "attention":
            raise ConfigError(
                f"[policy] lora_rank = {rank}: products of experts need a multiple of {step}; set one"
            )
        if rank and shape.fused_mlp and self.lora_layers != "attention":
            raise ConfigError(
                f'[policy] lora_rank = {rank} needs lora_layers = "attention" for a model whose gate and up '
                "projections are one tensor"
            )
        if rank > narrow:
            raise ConfigError(
                f"[policy] lora_rank = {rank} is above {narrow}, the least width of a layer; lower it"
            )
        if not rank and (self.lora_alpha, self.lora_layers) != (32, "all"):
            raise ConfigError(
                "[policy] lora_alpha and lora_layers have no meaning with lora_rank = 0, which trains all "
                "weights; set lora_rank, or leave them out"
            )

    def check_processes(self, data_parallel: int) -> None:
        """Raise ConfigError unless the experts can be divided among the processes of a stage."""
        stage = self.tensor_parallel * self.context_parallel * data_parallel
        if stage % self.expert_parallel:
            fitting = [str(n) for n in range(stage, 0, -1) if stage % n == 0 and n < self.expert_parallel]
            raise ConfigError(
                f"[policy] expert_parallel = {self.expert_parallel} does not divide the {stage} processes of "
                "policy.tensor_parallel * policy.context_parallel * learner.data_parallel; set it to "
                f"{' or '.join(fitting)}"
            )
