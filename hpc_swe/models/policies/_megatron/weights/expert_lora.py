"""Train low-rank adapters of experts, as `lora` does those of linear layers.

A rank computes all its experts in grouped products: rows of tokens are sorted by expert, and `ends` say where
each expert's end. The gradients of all its factors are grouped products, too.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers
from torch import Tensor, nn

from hpc_swe.models.deltas.low_rank import Factors, initial
from hpc_swe.models.policies._megatron.kernels import pinned
from hpc_swe.models.policies._megatron.model.experts import Experts
from hpc_swe.models.policies._megatron.weights.weights import ADAPTERS

Gradients = Callable[[Tensor, Tensor, Sequence[Tensor]], list[Tensor]]
"""Return the gradients of factors for inputs [tokens, in], the gradient [tokens, out] and the factors."""


class ExpertAdapter(nn.Module):  # type: ignore[misc]
    """Hold the factors a [experts, rank, inputs] and b [experts, outputs, rank] of one matrix of each expert.

    Ranks divide the experts, or of each one the outputs (split 0) or the inputs (split 1).
    """

    def __init__(
        self,
        weight: Tensor,
        place: tuple[str, str],
        rank: int,
        groups: ProcessGroupCollection,
        room: pinned.HostRoom,
    ) -> None:
        """Copy `weight`, a view [experts, outputs, inputs]; `place` is a prefix of experts, and a matrix."""
        super().__init__()
        self._prefix, self._kind = place
        self.source = f"{self._prefix}{self._kind}"
        self.split, self.is_divided = int(self._kind == "down_proj"), groups.ep.size() > 1
        self._weight, self._groups = weight, groups
        experts, outputs, inputs = weight.shape
        self._base = room.place([experts, outputs, inputs], weight.dtype)
        self._base.copy_(weight)
        self.a = nn.Parameter(weight.new_empty(experts, rank, inputs))
        self.b = nn.Parameter(weight.new_zeros(experts, outputs, rank))
        for factor, dim in ((self.a, 1), (self.b, 0)):
            is_part = self.is_divided or dim == self.split
            layers.set_tensor_model_parallel_attributes(factor, is_part, dim + 1, 1)
            factor.allreduce = not self.is_divided  # as of `Experts`
        self._start()

    def _start(self) -> None:
        group = self._groups.expt_tp
        parts = group.size() if self.split == 1 else 1
        first = self._groups.ep.rank() * len(self.a)
        for source, a in zip(self.sources[first:], self.a.data, strict=False):
            drawn = initial(source, a.shape[0], a.shape[1] * parts)
            a.copy_(drawn.chunk(parts, 1)[group.rank() if parts > 1 else 0])

    @property
    def sources(self) -> list[str]:
        """Return the names of this matrix of all experts."""
        count = len(self.a) * self._groups.ep.size()
        return [f"{self._prefix}{number}.{self._kind}" for number in range(count)]

    def merge(self, scale: float) -> None:
        """Write the rounded sums into the model."""
        for base, target, a, b in zip(self._base, self._weight, self.a.data, self.b.data, strict=True):
            found = torch.empty_like(base, device=a.device)
            Factors(a, b, scale).merge(base, found)
            target.copy_(found)

    def remove(self) -> None:
        self._weight.copy_(self._base)

    def sharded(self) -> Iterator[tuple[Tensor, ShardedTensor]]:
        """Yield each factor with its place in a checkpoint, which no layout changes."""
        groups = self._groups
        experts = (0, groups.ep.rank(), groups.ep.size())
        for name, factor, axis in (("a", self.a, 2), ("b", self.b, 1)):
            is_split = axis == self.split + 1
            parts = [(axis, groups.expt_tp.rank(), groups.expt_tp.size())] if is_split else []
            replica = (0, 0 if is_split else groups.expt_tp.rank(), groups.expt_dp.rank())
            key = f"{self.source}.{name}"
            yield factor, ShardedTensor.from_rank_offsets(key, factor, experts, *parts, replica_id=replica)

    def gathered(self) -> Iterator[dict[str, Tensor]]:
        """Yield the whole factors of all experts by name; all ranks must run to the end."""
        for name, factor, axis in (("lora_A", self.a, 2), ("lora_B", self.b, 1)):
            found = factor.data
            if axis == self.split + 1:
                found = whole(found, axis, self._groups.expt_tp)
            every = whole(found, 0, self._groups.ep)
            yield {f"{source}.{name}": each for source, each in zip(self.sources, every, strict=True)}


class Adapted(torch.autograd.Function):  # type: ignore[misc]
    """Pass a product on as it is, and give the factors of its weight their gradients."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, inputs: Tensor, gradients: Gradients, *factors: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.save_for_backward(inputs, *factors)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *factors = ctx.saved_tensors
        return grad, None, None, *ctx.gradients(inputs.flatten(0, -2), grad.flatten(0, -2), factors)


class AdaptedProduct:
    """Give a grouped product adapters: one, or one for each half of its outputs."""

    def __init__(self, adapters: Sequence[ExpertAdapter], scale: float) -> None:
        self.adapters, self._scale = adapters, scale

    def __call__(self, outputs: Tensor, inputs: Tensor, ends: Tensor) -> Tensor:
        """Return the outputs, whose backward gives factors their gradients."""
        if not torch.is_grad_enabled():
            return outputs
        factors = [factor for each in self.adapters for factor in (each.a, each.b)]
        found: Tensor = Adapted.apply(outputs, inputs, partial(self._gradients, ends), *factors)
        return found

    def _gradients(
        self, ends: Tensor, inputs: Tensor, grad: Tensor, factors: Sequence[Tensor]
    ) -> list[Tensor]:
        found = list[Tensor]()
        for part, a, b in zip(grad.chunk(len(factors) // 2, 1), factors[::2], factors[1::2], strict=True):
            part = part.contiguous()
            inner, outer = F.grouped_mm(inputs, a.mT, offs=ends), F.grouped_mm(part, b, offs=ends)
            found.append(self._scale * F.grouped_mm(outer.t(), inputs, offs=ends))
            found.append(self._scale * F.grouped_mm(part.t(), inner, offs=ends))
        return found

    def merge(self) -> None:
        for each in self.adapters:
            each.merge(self._scale)

    def remove(self) -> None:
        for each in self.adapters:
            each.remove()


def adapt(
    experts: Experts, prefix: str, rank: int, scale: float, room: pinned.HostRoom
) -> list[AdaptedProduct]:
    """Give the experts of a layer adapters."""
    gate, up = experts.gate_up.data.unbind(1)
    weights = {"gate_proj": gate, "up_proj": up, "down_proj": experts.down.data}
    found = [
        ExpertAdapter(weight, (prefix, kind), rank, experts.groups, room) for kind, weight in weights.items()
    ]
    experts.add_module(ADAPTERS, nn.ModuleList(found))
    experts.adapt_gate_up, experts.adapt_down = (
        AdaptedProduct(found[:2], scale),
        AdaptedProduct(found[2:], scale),
    )
    return [experts.adapt_gate_up, experts.adapt_down]


def whole(part: Tensor, axis: int, group: torch.distributed.ProcessGroup) -> Tensor:
    """Return what all ranks of a group have, joined; all ranks must call it."""
    parts = [torch.empty_like(part) for _ in range(group.size())]
    torch.distributed.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, axis)
