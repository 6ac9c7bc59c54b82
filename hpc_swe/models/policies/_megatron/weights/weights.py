"""Convert weights between Hugging Face's files and Megatron's parameters, bit for bit.

A `Layout` states which Hugging Face tensors make up one Megatron parameter: they are fused into one tensor,
which is cut into equal parts along one dimension, one part for each tensor-parallel rank. A rank has layouts
of its own layers and experts only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpc_swe.base.errors import ConfigError
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies.base import Tensors
from hpc_swe.models.weight_files import locate

ADAPTERS = "adapters"
"""Part of the names of parameters that belong to `lora`, and not to the model."""


class Snapshot:
    """Read tensors of a Hugging Face folder by name; open a file when its first tensor is read."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._where = folder, locate(folder)
        self._files: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor on the CPU, with the dtype it is stored in; raise ConfigError if there is none."""
        file = self.path(name)
        try:
            if file not in self._files:
                self._files[file] = safe_open(file, "pt")
            return self._files[file].get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"model: cannot read {name} in {file}: {error}; copy it again") from error

    def path(self, name: str) -> Path:
        """Return the file in which a tensor is; raise ConfigError if there is none."""
        if name not in self._where:
            raise ConfigError(f"model: no tensor {name} in {self._folder}; copy the model again")
        return self._where[name].path

    def __contains__(self, name: object) -> bool:
        return name in self._where


@dataclass(frozen=True)
class Layout:
    """Relate one Megatron parameter to Hugging Face tensors."""

    sources: list[str]
    """Names of the Hugging Face tensors."""
    dim: int | None = None
    """Dimension of the fused tensor that is split over ranks; None when it is not split."""
    view: tuple[int, ...] | None = None
    """Shape of a rank's part of the fused tensor, -1 at `dim`; None when it is the parameter's own shape."""
    fuse: Callable[[Sequence[Tensor]], Tensor] = lambda tensors: tensors[0]
    unfuse: Callable[[Tensor], Sequence[Tensor]] = lambda whole: [whole]
    is_divided: bool = False
    """Whether each expert-parallel rank holds other experts, whole: tensors of its own where `dim` is None,
    and else its part of a tensor of all experts."""
    is_copy: bool = False
    """Whether another stage has the same tensor, which it exports."""

    def part(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Fuse Hugging Face tensors, and return the part of one rank."""
        whole = self.fuse(tensors)
        return whole if self.dim is None else whole.chunk(size, self.dim)[rank]

    def whole(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Join the parts of all ranks, and return the Hugging Face tensors by name."""
        if self.dim is None:
            fused = parts[0]
        else:
            fused = torch.cat([part.view(self.view or part.shape) for part in parts], self.dim)
        return dict(zip(self.sources, (tensor.contiguous() for tensor in self.unfuse(fused)), strict=True))


def layouts(model: GPTModel, shape: ModelShape) -> dict[str, Layout]:
    """Return the layout of every parameter of the model on this rank, in the order of the parameters."""
    first = model.decoder.layers[0].layer_number - 1
    group = model.pg_collection.ep
    count = shape.experts // group.size()
    experts = range(group.rank() * count, (group.rank() + 1) * count)
    names = [name for name, _ in model.named_parameters() if f".{ADAPTERS}." not in name]
    return {name: _layout(name, first, experts, shape) for name in names}


def dividing_group(model: GPTModel, layout: Layout) -> dist.ProcessGroup:
    """Return the group whose ranks may hold different parts of a parameter."""
    return model.pg_collection.ep if layout.is_divided else model.pg_collection.tp


def load(model: GPTModel, shape: ModelShape, tensors: Tensors) -> None:
    """Copy this rank's part of the weights into the parameters, converting to their dtype."""
    parameters = dict(model.named_parameters())
    for name, layout in layouts(model, shape.as_stored(tensors)).items():
        group = dividing_group(model, layout)
        part = layout.part([tensors[source] for source in layout.sources], group.rank(), group.size())
        parameters[name].data.copy_(part.reshape(parameters[name].shape))


def gather(part: Tensor, layout: Layout, owner: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Gather a parameter on rank `owner` of the group, as Hugging Face tensors; others get {}.

    They may share the parameter's memory.
    """
    mine = group.rank() == owner
    if layout.dim is None or group.size() == 1:
        return layout.whole([part]) if mine else {}
    parts = [torch.empty_like(part) for _ in range(group.size())] if mine else None
    dist.gather(part.contiguous(), parts, group=group, group_dst=owner)
    return layout.whole(parts) if parts else {}


def _layout(name: str, first: int, experts: range, shape: ModelShape) -> Layout:
    if name == "embedding.word_embeddings.weight":
        return Layout([f"{shape.prefix}embed_tokens.weight"], dim=0)
    if name == "output_layer.weight":
        source = f"{shape.prefix}embed_tokens.weight" if shape.tied else "lm_head.weight"
        return Layout([source], dim=0, is_copy=shape.tied)
    if name == "decoder.final_layernorm.weight":
        return Layout([f"{shape.prefix}norm.weight"])
    _, _, layer, inner = name.split(".", 3)
    number = first + int(layer)
    prefix = f"{shape.prefix}layers.{number}."
    if shape.delta and number in shape.delta.layers and inner.startswith("self_attention."):
        return _delta_net(f"{prefix}linear_attn.", inner.removeprefix("self_attention."), shape)
    if inner.startswith("mlp.experts."):
        of_form = _fused_experts if shape.has_fused_experts else _experts
        return of_form(f"{prefix}mlp.experts.", inner, experts, shape)
    return _layer_layout(prefix, inner, shape)


def _layer_layout(prefix: str, name: str, shape: ModelShape) -> Layout:
    simple = {
        "input_layernorm.weight": ("input_layernorm.weight", None),
        "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
        "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
        "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
        "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
        "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
        "mlp.router.weight": ("mlp.gate.weight", None),
        "mlp.shared.gate": ("mlp.shared_expert_gate.weight", None),
        "mlp.shared.linear_fc2.weight": ("mlp.shared_expert.down_proj.weight", 1),
    }
    if shape.fused_mlp:
        simple["mlp.linear_fc2.weight"] = (f"{shape.fused_mlp[1]}.weight", 1)
    if name in simple:
        source, dim = simple[name]
        return Layout([prefix + source], dim)
    if name.startswith("self_attention.linear_qkv."):
        return _qkv(prefix, name.rpartition(".")[2], shape)
    view = (2, -1, shape.hidden)
    if shape.fused_mlp:
        source = f"{prefix}{shape.fused_mlp[0]}.weight"
        return Layout([source], 1, view, lambda one: one[0].view(view), lambda whole: [whole.flatten(0, 1)])
    place = "mlp.shared_expert" if name.startswith("mlp.shared.") else "mlp"
    sources = [f"{prefix}{place}.{kind}_proj.weight" for kind in ("gate", "up")]
    return Layout(sources, 1, view, torch.stack, torch.unbind)


def _qkv(prefix: str, kind: str, shape: ModelShape) -> Layout:
    """Order the rows by group, as Megatron does: the queries of a group, its key, its value."""
    tail = (shape.hidden,) if kind == "weight" else ()
    gates = 2 if shape.delta else 1
    sizes = [shape.heads // shape.groups * shape.head_dim * gates, shape.head_dim, shape.head_dim]

    rows = [shape.groups * size for size in sizes]

    def fuse(tensors: Sequence[Tensor]) -> Tensor:
        parts = tensors[0].split(rows) if shape.has_fused_qkv else tensors
        return torch.cat([part.view(shape.groups, -1, *tail) for part in parts], 1)

    def unfuse(whole: Tensor) -> list[Tensor]:
        parts = [part.reshape(-1, *tail) for part in whole.split(sizes, 1)]
        return [torch.cat(parts)] if shape.has_fused_qkv else parts

    sources = [
        f"{prefix}self_attn.{name}_proj.{kind}" for name in (["qkv"] if shape.has_fused_qkv else "qkv")
    ]
    return Layout(sources, 0, (-1, sum(sizes), *tail), fuse, unfuse)


def _delta_net(prefix: str, name: str, shape: ModelShape) -> Layout:
    simple: dict[str, tuple[str, int | None]] = {
        "A_log": ("A_log", 0),
        "dt_bias": ("dt_bias", 0),
        "norm": ("norm.weight", None),
        "linear_proj.weight": ("out_proj.weight", 1),
    }
    if name in simple:
        source, dim = simple[name]
        return Layout([prefix + source], dim)
    sizes = shape.delta
    assert sizes is not None
    if name == "convolution":
        whole = [sizes.keys, sizes.keys, sizes.values]
        return _by_key_head([f"{prefix}conv1d.weight"], [whole], (1, sizes.kernel), sizes.key_heads)
    sources = [f"{prefix}in_proj_{kind}.weight" for kind in ("qkv", "z", "b", "a")]
    heads = sizes.value_heads
    parts = [[sizes.keys, sizes.keys, sizes.values], [sizes.values], [heads], [heads]]
    return _by_key_head(sources, parts, (shape.hidden,), sizes.key_heads)


def _by_key_head(sources: list[str], parts: list[list[int]], tail: tuple[int, ...], heads: int) -> Layout:
    """Order rows by key head; each source has `parts` of so many rows, and each part those of all heads."""
    widths, columns = [rows // heads for source in parts for rows in source], tail[-1]

    def fuse(tensors: Sequence[Tensor]) -> Tensor:
        pairs = zip(tensors, parts, strict=True)
        every = [part for tensor, rows in pairs for part in tensor.view(-1, columns).split(rows)]
        return torch.cat([part.view(heads, -1, columns) for part in every], 1)

    def unfuse(whole: Tensor) -> list[Tensor]:
        every = iter([part.reshape(-1, *tail) for part in whole.split(widths, 1)])
        return [torch.cat([next(every) for _ in source]) for source in parts]

    return Layout(sources, 0, (-1, sum(widths), columns), fuse, unfuse)


def _experts(prefix: str, name: str, experts: range, shape: ModelShape) -> Layout:
    kinds = ("gate", "up") if name == "mlp.experts.gate_up" else ("down",)
    sources = [f"{prefix}{expert}.{kind}_proj.weight" for expert in experts for kind in kinds]

    def fuse(tensors: Sequence[Tensor]) -> Tensor:
        whole = torch.stack(list(tensors))
        return whole.view(len(experts), 2, *whole.shape[1:]) if len(kinds) == 2 else whole

    def unfuse(whole: Tensor) -> Sequence[Tensor]:
        return list(whole.flatten(0, 1) if len(kinds) == 2 else whole)

    is_divided = len(experts) < shape.experts
    return Layout(sources, None if is_divided else 2, None, fuse, unfuse, is_divided)


def _fused_experts(prefix: str, name: str, experts: range, shape: ModelShape) -> Layout:
    """Relate a parameter to a tensor of all experts, which has the rows of gates before those of ups."""
    is_divided = len(experts) < shape.experts
    dim = 0 if is_divided else 2
    if name == "mlp.experts.down":
        return Layout([f"{prefix}down_proj"], dim, is_divided=is_divided)

    def fuse(tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].unflatten(1, (2, shape.ffn))

    def unfuse(whole: Tensor) -> Sequence[Tensor]:
        return [whole.flatten(1, 2)]

    return Layout([f"{prefix}gate_up_proj"], dim, None, fuse, unfuse, is_divided)
