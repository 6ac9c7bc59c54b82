"""Bring tokens to their experts and back, while the host runs ahead of the GPU.

Ranks that share the experts of a layer exchange whole tokens: each gets those of all, copies rows of them
for its experts, and returns one sum for each token. For up to as many ranks as a token has experts this moves
fewer bytes than a copy for each expert, and all sizes are known but one: how many rows this rank computes.
The host reads it while the GPU exchanges the tokens. All sums are in a fixed order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hpc_swe.models.policies._megatron.kernels.kernels import add_rows


@dataclass(frozen=True)
class TokenExchange:
    """Exchange tokens between the ranks of a group, of which each has up to `tokens`."""

    group: dist.ProcessGroup
    tokens: int

    def gather(self, own: Tensor, fill: int = 0) -> Tensor:
        """Return the rows of all ranks, [ranks * tokens, ...], and `fill` where a rank has fewer."""
        ranks = self.group.size()
        if ranks == 1:
            return own
        padded = _padded(own, self.tokens, fill)
        whole = own.new_empty(ranks * self.tokens, *own.shape[1:])
        dist.all_gather_into_tensor(whole, padded, group=self.group)
        return whole

    def add_up(self, parts: Tensor, count: int) -> Tensor:
        """Return the sums over all ranks of what they have for this rank's `count` tokens."""
        ranks = self.group.size()
        if ranks == 1:
            return parts
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return received.unflatten(0, (ranks, -1))[:, :count].sum(0)


class Route:
    """Say which rows the experts of this rank compute; they are sorted by expert."""

    def __init__(self, chosen: Tensor, experts: range, exchange: TokenExchange, total: int) -> None:
        """Take the experts of this rank's tokens, [tokens, k], of `total` experts in all."""
        self._own, self._exchange = len(chosen), exchange
        # A radix sort of bytes is several times as fast; no expert has the number that fills.
        narrow, fill = (torch.uint8, 255) if total <= 255 else (torch.int32, total)
        every = exchange.gather(chosen.to(narrow), fill)
        mine = (every >= experts.start) & (every < experts.stop)
        keys = torch.where(mine, every - experts.start, len(experts)).flatten()
        keys, self._order = keys.sort(stable=True)
        numbers = torch.arange(len(experts) + 1, device=keys.device, dtype=narrow)
        starts = torch.searchsorted(keys, numbers, out_int32=True)
        self.ends = starts[1:]
        """int32 [experts of this rank], where the rows of each end."""
        self._size = every.shape
        self._count = _read_later(starts[-1]) if len(experts) < total else every.numel

    @cached_property
    def choices(self) -> Tensor:
        """Return each row's place among the choices of all ranks, int64 [rows]."""
        return self._order[: self._count()]

    @cached_property
    def rows(self) -> Tensor:
        """Return each row's token among those of all ranks, int32 [rows]."""
        return (self.choices // self._size[1]).int()

    @cached_property
    def places(self) -> Tensor:
        """Return the row of each choice, int32 [tokens of all ranks, k]; -1 if another rank computes it."""
        numbers = torch.arange(len(self.choices), device=self._order.device, dtype=torch.int32)
        found = torch.full((len(self._order),), -1, device=numbers.device, dtype=torch.int32)
        return found.index_copy_(0, self.choices, numbers).view(self._size)

    def spread(self, tokens: Tensor) -> Tensor:
        """Return the rows, [rows, width], of this rank's tokens [tokens, width] and of the others'."""
        whole = self._exchange.gather(tokens)  # first, for the host waits for the number of rows meanwhile
        return whole.index_select(0, self.rows)

    def collect(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows on all ranks, for this rank's tokens."""
        return self._exchange.add_up(add_rows(rows, self.places), self._own)

    def spread_weights(self, weights: Tensor) -> Tensor:
        """Return the weight of each row, [rows], of the weights of this rank's choices [tokens, k]."""
        return self._exchange.gather(weights).flatten().index_select(0, self.choices)

    def collect_weights(self, rows: Tensor) -> Tensor:
        """Return for this rank's choices what the ranks that compute them have, [tokens, k]."""
        found = rows.new_zeros(self._size.numel()).index_copy_(0, self.choices, rows)
        return self._exchange.add_up(found.view(self._size), self._own)


class Spread(torch.autograd.Function):  # type: ignore[misc]
    """Copy tokens to the rows of their experts."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.spread(tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.route.collect(grad), None


class Collect(torch.autograd.Function):  # type: ignore[misc]
    """Add up the rows of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.collect(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.route.spread(grad), None


class SpreadWeights(torch.autograd.Function):  # type: ignore[misc]
    """Copy the weights of choices to their rows."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.spread_weights(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.route.collect_weights(grad), None


def _padded(own: Tensor, tokens: int, fill: int) -> Tensor:
    missing = tokens - len(own)
    return F.pad(own, (0, 0) * (own.dim() - 1) + (0, missing), value=fill) if missing else own.contiguous()


def _read_later(value: Tensor) -> Callable[[], int]:
    """Copy a number to the host; return what waits for it."""
    if not value.is_cuda:
        return lambda: int(value)
    copied = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    copied.copy_(value, non_blocking=True)
    (arrived := torch.cuda.Event()).record()

    def wait() -> int:
        arrived.synchronize()
        return int(copied)

    return wait
