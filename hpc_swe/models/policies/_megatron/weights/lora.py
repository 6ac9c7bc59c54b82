"""Train low-rank adapters of the linear layers (LoRA) while the weights that were loaded stay fixed.

The model computes with the merged weights, W = round(W0 + alpha / rank * B A), which are also what is
published. So learner and engine have the same bits, and forward costs what it costs without adapters.
Backward gives A and B the gradient of W = W0 + alpha / rank * B A: rounding counts as the identity, as it
does where bfloat16 weights are rounded from float32 ones. The gradient of W itself is never computed.

    y = x W^T      dA = scale (dy B)^T x      dB = scale dy^T (x A^T)

Each linear layer has either its outputs or its inputs split over tensor-parallel ranks, and with them B or A;
the other factor is whole on every rank, and its gradient is a sum over the ranks.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.store import atomic
from hpc_swe.models.deltas.low_rank import ADAPTER_CONFIG, ADAPTER_TENSORS, Factors, initial
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron.kernels import pinned
from hpc_swe.models.policies._megatron.model.delta_net import GatedDeltaNet
from hpc_swe.models.policies._megatron.model.experts import Experts
from hpc_swe.models.policies._megatron.model.model import PolicyModel
from hpc_swe.models.policies._megatron.model.parallel import TorchRanks
from hpc_swe.models.policies._megatron.settings import MegatronSettings
from hpc_swe.models.policies._megatron.weights import expert_lora
from hpc_swe.models.policies._megatron.weights.expert_lora import (
    Adapted,
    AdaptedProduct,
    ExpertAdapter,
    whole,
)
from hpc_swe.models.policies._megatron.weights.tensor_file import TensorFiles
from hpc_swe.models.policies._megatron.weights.weights import ADAPTERS

IDENTITY = ("lora_rank", "lora_alpha", "lora_layers")
"""Keys of the policy to which a checkpoint of adapters belongs."""
PREFIX = "base_model.model."
"""Of the names of matrices in PEFT's files."""
FOLDER = "adapter"
"""Folder of the adapters within a version, in the format of PEFT."""


@dataclass(frozen=True)
class Rows:
    """Locate the rows of one Hugging Face matrix in a fused weight, seen as [groups, width, inputs]."""

    name: str
    """Of the matrix within its layer, for example self_attn.q_proj."""
    groups: int
    width: int
    start: int
    size: int
    parts: tuple[int, ...] = ()
    """Rows of each group in the parts of the matrix, if these stand one after another there, each of all
    groups; empty where the matrix has the rows group by group."""

    def of_weight(self, fused: Tensor) -> Tensor:
        """Return a view [groups, size, inputs] of [rows, inputs]."""
        return fused.view(self.groups, self.width, -1)[:, self.start : self.start + self.size]

    def of_outputs(self, fused: Tensor) -> Tensor:
        """Return this matrix's columns [tokens, groups * size] of [tokens, rows]."""
        parts = fused.view(len(fused), self.groups, self.width)
        return parts[:, :, self.start : self.start + self.size].flatten(1)

    def of_matrix(self, whole: Tensor) -> Tensor:
        """Return the rows [outputs, rank] of all ranks, which are in the order of groups, in the matrix's."""
        parts = whole.view(-1, self.size, whole.shape[1]).split(self.parts or self.size, 1)
        return torch.cat([part.flatten(0, 1) for part in parts])


class Adapter(nn.Module):  # type: ignore[misc]
    """Hold the factors a [rank, inputs] and b [outputs, rank] of one matrix, one of them a rank's part."""

    def __init__(
        self, rows: Rows, source: str, base: Tensor, rank: int, split: int, room: pinned.HostRoom
    ) -> None:
        """Copy `base` [groups, size, inputs], of which ranks divide the outputs (split 0) or inputs (1)."""
        super().__init__()
        self.rows, self.source, self.split = rows, source, split
        outputs, inputs = base.shape[0] * base.shape[1], base.shape[2]
        self.base = room.place([outputs, inputs], base.dtype)
        self.base.view(base.shape).copy_(base)
        self.a = nn.Parameter(base.new_empty(rank, inputs))
        self.b = nn.Parameter(base.new_zeros(outputs, rank))
        layers.set_tensor_model_parallel_attributes(self.a, split == 1, 1, 1)
        layers.set_tensor_model_parallel_attributes(self.b, split == 0, 0, 1)

    def start(self, group: dist.ProcessGroup) -> None:
        """Draw A; B is 0."""
        parts = group.size() if self.split == 1 else 1
        drawn = initial(self.source, self.a.shape[0], self.a.shape[1] * parts)
        self.a.data.copy_(drawn.chunk(parts, 1)[group.rank() if parts > 1 else 0])

    def merged(self, scale: float) -> Tensor:
        """Return the rounded sum [outputs, inputs], on the device."""
        found = torch.empty_like(self.base, device=self.a.device)
        Factors(self.a.data, self.b.data, scale).merge(self.base, found)
        return found


class AdaptedLinear:
    """Give a linear layer of Megatron adapters; `split` is the dimension of its weight that ranks divide."""

    def __init__(
        self,
        module: nn.Module,
        rows: Sequence[Rows],
        prefix: str,
        settings: MegatronSettings,
        room: pinned.HostRoom,
    ) -> None:
        rank = settings.lora_rank
        self.split = 1 if isinstance(module, layers.RowParallelLinear) else 0
        weight: Tensor = module.weight.data
        self.adapters = [
            Adapter(each, f"{prefix}{each.name}", each.of_weight(weight), rank, self.split, room)
            for each in rows
        ]
        module.add_module(ADAPTERS, nn.ModuleList(self.adapters))
        module.register_forward_hook(self._adapt)
        self._weight, self._scale, self._group = weight, settings.lora_alpha / rank, module.tp_group
        self._gathers = bool(module.sequence_parallel) and self._group.size() > 1

    def merge(self) -> None:
        for each in self.adapters:
            target = each.rows.of_weight(self._weight)
            target.copy_(each.merged(self._scale).view(target.shape))

    def remove(self) -> None:
        for each in self.adapters:
            target = each.rows.of_weight(self._weight)
            target.copy_(each.base.view(target.shape))

    def _adapt(
        self, _: nn.Module, inputs: tuple[Tensor], outputs: tuple[Tensor, Any]
    ) -> tuple[Any, Any] | None:
        if not torch.is_grad_enabled():
            return None
        factors = [factor for each in self.adapters for factor in (each.a, each.b)]
        return Adapted.apply(outputs[0], inputs[0], self.gradients, *factors), outputs[1]

    def gradients(self, inputs: Tensor, grad: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of a and b of each adapter, for inputs [tokens, in] and grad [tokens, out].

        With sequence parallelism one of the two has this rank's tokens only, and the small products are
        exchanged in place of it.
        """
        outputs = [each.rows.of_outputs(grad) for each in self.adapters]
        inner = inputs @ torch.cat(list(factors[::2])).t()
        outer = torch.cat([part @ b for part, b in zip(outputs, factors[1::2], strict=True)], 1)
        if self._gathers:
            gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
            inner = (scatter if self.split else gather)(inner, group=self._group)
            outer = (gather if self.split else scatter)(outer, group=self._group)
        parts = zip(outputs, inner.chunk(len(outputs), 1), outer.chunk(len(outputs), 1), strict=True)
        return [
            self._scale * each
            for output, of_inputs, of_outputs in parts
            for each in (of_outputs.t() @ inputs, output.t() @ of_inputs)
        ]


class Adapters:
    """Hold the adapters of a model; without `lora_rank` there are none, and nothing here does anything."""

    def __init__(
        self, model: PolicyModel, shape: ModelShape, settings: MegatronSettings, ranks: TorchRanks
    ) -> None:
        self._settings, self._ranks, self._layers = settings, ranks, list[AdaptedLinear]()
        self._products, self._adapted = list[AdaptedProduct](), list[AdaptedLinear | AdaptedProduct]()
        if not settings.lora_rank:
            return
        model.requires_grad_(False)
        model.embedding.register_forward_hook(_require_gradient)
        chosen = list(_choose(model, shape, settings))
        experts = {} if settings.lora_layers == "attention" else _experts(model, shape)
        base = sum(module.weight.nbytes + pinned.ALIGNED * len(rows) for module, rows, _ in chosen)
        base += sum(each.gate_up.nbytes + each.down.nbytes + 3 * pinned.ALIGNED for each in experts.values())
        room = pinned.take("policy.lora_rank", base, ranks, "adapt fewer layers (policy.lora_layers)")
        self._layers = [AdaptedLinear(*each, settings, room) for each in chosen]
        for adapter in self._adapters():
            adapter.start(ranks.tensor_group)
        rank, scale = settings.lora_rank, settings.lora_alpha / settings.lora_rank
        for prefix, each in experts.items():
            self._products += expert_lora.adapt(each, prefix, rank, scale, room)
        self._adapted = [*self._layers, *self._products]
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        values = (settings.lora_rank, settings.lora_alpha, settings.lora_layers)
        self._identity: dict[str, object] = dict(zip(IDENTITY, values, strict=True))

    def __bool__(self) -> bool:
        return bool(self._adapted)

    def merge(self) -> None:
        """Write the merged weights into the model."""
        for layer in self._adapted:
            layer.merge()

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Let the model compute with the weights that were loaded, for the duration of the block."""
        for layer in self._adapted:
            layer.remove()
        try:
            yield
        finally:
            self.merge()

    def add_up_gradients(self) -> None:
        """Add up what tensor-parallel ranks have of the gradients of factors that are whole on every rank."""
        group = self._ranks.tensor_group
        if group.size() == 1 or not self:
            return
        whole = [(adapter.b if adapter.split else adapter.a).main_grad for adapter in self._adapters()]
        experts = [adapter for adapter in self._of_experts() if not adapter.is_divided]
        whole += [(adapter.b if adapter.split else adapter.a).main_grad for adapter in experts]
        joined = torch.cat([gradient.flatten() for gradient in whole])
        dist.all_reduce(joined, group=group)
        for gradient, part in zip(whole, joined.split([one.numel() for one in whole]), strict=True):
            gradient.copy_(part.view(gradient.shape))

    def sharded_state(self) -> dict[str, ShardedTensor]:
        """Describe the factors to a distributed checkpoint, under names that no layout changes."""
        groups = {"tp_group": self._ranks.tensor_group, "dp_cp_group": self._ranks.replica_group}
        state = {}
        for each in self._adapters():
            for factor, tensor, axis in (("a", each.a, 1), ("b", each.b, 0)):
                key, name = f"{each.source}.{factor}", self._names[id(tensor)]
                if axis == each.split:
                    state[name] = make_tp_sharded_tensor_for_checkpoint(tensor, key, axis, **groups)
                else:
                    state[name] = make_sharded_tensor_for_checkpoint(tensor, key, **groups)
        pairs = (pair for each in self._of_experts() for pair in each.sharded())
        return state | {self._names[id(tensor)]: sharded for tensor, sharded in pairs}

    @property
    def identity(self) -> dict[str, object]:
        """Return what a checkpoint of adapters belongs to; {} without adapters."""
        return self._identity if self else {}

    def require(self, identity: dict[str, object], folder: Path) -> None:
        """Raise ConfigError unless a checkpoint holds adapters like these, or none where there are none."""
        mine = self.identity
        for key in IDENTITY:
            if mine.get(key) != identity.get(key):
                raise ConfigError(
                    f"{folder}: saved with [policy] {key} = {identity.get(key)}, not {mine.get(key)}; set it "
                    "as it was when the run started, or start another run"
                )

    @contextmanager
    def writing(self, folder: Path, model: Path) -> Iterator[None]:
        """Write a folder that PEFT loads onto `model`, until the block ends; all ranks must call it.

        Rank 0 writes it. Before the block factors are gathered one after another, because no rank waits for
        one whose writing has failed; rank 0 raises StorageError after the block. An error of the block comes
        first, since all ranks may have it.
        """
        names = [f"{PREFIX}{source}.lora_{kind}.weight" for source in self._sources for kind in "AB"]
        files = TensorFiles([folder / ADAPTER_TENSORS], names) if self._ranks.rank == 0 else None
        for gathered in self._gathered():
            if files:
                named = {f"{PREFIX}{name}.weight": factor for name, factor in gathered.items()}
                files.add(named)
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if files:
                    files.finish()
            raise
        if files:
            with atomic.storage(folder):
                files.finish()
                (folder / ADAPTER_CONFIG).write_text(json.dumps(self._peft(model), indent=2))

    def _gathered(self) -> Iterator[dict[str, Tensor]]:
        """Yield whole factors by name, of one matrix at a time; all ranks must run to the end."""
        for each in self._adapters():
            a, b, group = each.a.data, each.b.data, self._ranks.tensor_group
            a, b = (whole(a, 1, group), b) if each.split else (a, whole(b, 0, group))
            yield {f"{each.source}.lora_A": a.contiguous(), f"{each.source}.lora_B": each.rows.of_matrix(b)}
        for expert in self._of_experts():
            yield from expert.gathered()

    @property
    def _sources(self) -> list[str]:
        """Return the names of all matrices."""
        of_experts = (source for each in self._of_experts() for source in each.sources)
        return [*(each.source for each in self._adapters()), *of_experts]

    def _peft(self, model: Path) -> dict[str, object]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(model),
            "r": self._settings.lora_rank,
            "lora_alpha": self._settings.lora_alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({source.rpartition(".")[2] for source in self._sources}),
            "inference_mode": True,
        }

    def _adapters(self) -> Iterator[Adapter]:
        for layer in self._layers:
            yield from layer.adapters

    def _of_experts(self) -> Iterator[ExpertAdapter]:
        for product in self._products:
            yield from product.adapters


def _experts(model: PolicyModel, shape: ModelShape) -> dict[str, Experts]:
    """Return the experts of each layer that has some, by the prefix of their names in files."""
    decoder = model.decoder.layers
    found = ((layer.layer_number - 1, layer.mlp.experts) for layer in decoder if layer.is_moe_layer)
    return {f"{shape.prefix}layers.{number}.mlp.experts.": experts for number, experts in found}


def _choose(
    model: PolicyModel, shape: ModelShape, settings: MegatronSettings
) -> Iterator[tuple[nn.Module, list[Rows], str]]:
    place = "mlp.shared_expert." if shape.shared_ffn else "mlp."
    ffn = (shape.shared_ffn or shape.ffn) // settings.tensor_parallel
    gate_up = [Rows(f"{place}{kind}_proj", 1, 2 * ffn, at, ffn) for kind, at in (("gate", 0), ("up", ffn))]
    down = [Rows(f"{place}down_proj", 1, shape.hidden, 0, shape.hidden)]
    for layer in model.decoder.layers:
        attention, chosen = layer.self_attention, list[tuple[nn.Module, list[Rows]]]()
        mlp = layer.mlp.shared if layer.is_moe_layer else layer.mlp  # None without a shared expert
        if settings.lora_layers != "mlp":
            is_delta = isinstance(attention, GatedDeltaNet)
            rows, output = (_of_delta_net if is_delta else _of_attention)(shape, settings.tensor_parallel)
            inputs = attention.linear_in if is_delta else attention.linear_qkv
            chosen += [(inputs, rows), (attention.linear_proj, [output])]
        if settings.lora_layers != "attention" and mlp is not None:
            chosen += [(mlp.linear_fc1, gate_up), (mlp.linear_fc2, down)]
        for module, rows in chosen:
            yield module, rows, f"{shape.prefix}layers.{layer.layer_number - 1}."


def _of_attention(shape: ModelShape, ranks: int) -> tuple[list[Rows], Rows]:
    groups, size = shape.groups // ranks, shape.head_dim
    queries = shape.heads // shape.groups * size * (2 if shape.delta else 1)  # each with its gate
    width, places = queries + 2 * size, {"q": (0, queries), "k": (queries, size), "v": (queries + size, size)}
    rows = [Rows(f"self_attn.{name}_proj", groups, width, *place) for name, place in places.items()]
    if shape.has_fused_qkv:
        rows = [Rows("self_attn.qkv_proj", groups, width, 0, width, (queries, size, size))]
    return rows, Rows("self_attn.o_proj", 1, shape.hidden, 0, shape.hidden)


def _of_delta_net(shape: ModelShape, ranks: int) -> tuple[list[Rows], Rows]:
    """Leave out those of a head's decay and rate, which have as few rows as there are heads."""
    sizes = shape.delta
    assert sizes is not None
    groups, shared = sizes.key_heads // ranks, sizes.value_heads // sizes.key_heads
    values = shared * sizes.value_dim
    mixed = 2 * sizes.key_dim + values
    width, parts = mixed + values + 2 * shared, (sizes.key_dim, sizes.key_dim, values)
    rows = [
        Rows("linear_attn.in_proj_qkv", groups, width, 0, mixed, parts),
        Rows("linear_attn.in_proj_z", groups, width, mixed, values),
    ]
    return rows, Rows("linear_attn.out_proj", 1, shape.hidden, 0, shape.hidden)


def _require_gradient(_: nn.Module, __: object, output: Tensor) -> None:
    """Let a layer that is recomputed see that backward must pass it: none of its inputs is trained."""
    if torch.is_grad_enabled():
        output.requires_grad_()
