"""Exchange rows between the GPUs of one node by their copy engines, beside products.

NCCL exchanges rows in kernels, which take multiprocessors from the products that they should run beside. Here
every rank offers rows in memory that the others can read (torch's symmetric memory), and pulls theirs on a
stream of its own. A copy engine does that without a multiprocessor; only barriers, of about a tenth of a
millisecond each with the wait for the slowest rank, stand among the products.

Two pieces of memory serve by turns. A rank fills one again two exchanges later, and between them is the
barrier of the other one, which a rank passes when all have pulled what was offered before. Sums of ranks are
added up in float32 and rounded once, where NCCL rounds after each rank.
"""

import logging
import math
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_swe.models.policies._megatron.kernels import compat
from hpc_swe.models.policies._megatron.kernels.meeting import TIMEOUT

log = logging.getLogger(__name__)
CHANNELS = (2, 3)
"""Numbers of the barriers of the two pieces of memory; torch's own operators use 0 and 1."""


class PeerMemory(Protocol):
    """Memory of one size on every rank, which all of them can read; torch's symmetric memory is such."""

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """Let the caller's stream wait until the streams of all ranks are here."""

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the beginning of a rank's memory as a tensor."""


Reserve = Callable[[int, dist.ProcessGroup], PeerMemory]
"""Reserve so many bytes on every rank of a group."""
Wait = Callable[[], Tensor]
"""Let the caller's stream wait for an exchange that has begun, and return its result."""


def symmetric_memory(size: int, group: dist.ProcessGroup) -> PeerMemory:
    """Reserve memory of the GPUs of one node; raise RuntimeError on all ranks if one of them has no room.

    A rank that meets the others alone would wait for them for as long as a group waits.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # copies need none
    from torch.distributed import _symmetric_memory as symmetric

    torch.cuda.empty_cache()  # the driver gives this memory, and cannot take it from the allocator
    said, refused = [""] * group.size(), ""
    try:
        own = symmetric.empty(size, dtype=torch.uint8, device=f"cuda:{torch.cuda.current_device()}")
    except RuntimeError as error:
        refused = str(error) or type(error).__name__
    dist.all_gather_object(said, refused, group=group)
    for rank, each in enumerate(said):
        if each:
            raise RuntimeError(f"rank {rank} of the group has no {size} bytes that others can read: {each}")
    return _Kept(own, symmetric.rendezvous(own, group.group_name))


class _Kept:
    """Keep the tensor whose memory the others read for as long as the way to it."""

    def __init__(self, own: Tensor, memory: Any) -> None:
        self._own, self.barrier, self.get_buffer = own, memory.barrier, memory.get_buffer


class RowExchange:
    """Gather and scatter rows. All ranks of the group must call its methods in the same order."""

    def __init__(self, group: dist.ProcessGroup, reserve: Reserve = symmetric_memory) -> None:
        self._group, self._reserve = group, reserve
        self._ranks, self._rank = group.size(), group.rank()
        self._side = compat.new_stream(priority=-1)
        self._turn = 0
        self._memory: list[PeerMemory | None] = [None, None]
        self._sizes = [0, 0]
        self._shape: tuple[int, ...] = ()
        self._dtype = torch.bfloat16
        self._last, self._earlier = None, None
        """Events of the last pull, and of the last one of the turn before."""

    def gathered_product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return all rows @ weight^T, for this rank's, [tokens / ranks, .., width], and [out, width].

        It multiplies its own rows first, and those of each other rank when they have arrived.
        """
        whole, arrivals = self._begin_gather(rows)
        output = rows.new_empty(self._ranks, *rows.shape[:-1], len(weight))
        _multiply(rows, weight.t(), output[self._rank])
        for rank, arrival in zip(self._others(), arrivals, strict=True):
            torch.cuda.current_stream().wait_event(arrival)
            _multiply(whole[rank], weight.t(), output[rank])
        return output.flatten(0, 1)

    def gather(self, rows: Tensor) -> Wait:
        """Begin to gather all ranks' rows, [tokens / ranks, ..]."""
        whole, arrivals = self._begin_gather(rows)
        whole[self._rank].copy_(rows)

        def wait() -> Tensor:
            torch.cuda.current_stream().wait_event(arrivals[-1])
            return whole.flatten(0, 1)

        return wait

    def scattered_product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's part of the sum of rows @ weight^T over ranks, for `rows` [tokens, .., width].

        It multiplies the rows of one other rank after another, and its own while the last of theirs arrive.
        """
        parts = rows.contiguous().view(self._ranks, -1, *rows.shape[1:])
        shape = (*parts.shape[:-1], len(weight))
        offered, arrived = self._begin(shape, rows.dtype), rows.new_empty(shape)
        for step, rank in enumerate(self._others(), 1):
            _multiply(parts[rank], weight.t(), offered[rank])
            self._offer()
            other = (self._rank - step) % self._ranks  # whose turn it was to multiply this rank's rows
            arrival = self._pull(self._offered(other)[self._rank], arrived[other])
        _multiply(parts[self._rank], weight.t(), arrived[self._rank])
        torch.cuda.current_stream().wait_event(arrival)
        return arrived.sum(0)

    def scatter_product(self, rows: Tensor, weight: Tensor) -> Wait:
        """Compute rows @ weight, for `weight` [width, out], and begin to scatter the sums over ranks."""
        shape = (self._ranks, len(rows) // self._ranks, *rows.shape[1:-1], weight.shape[1])
        offered, arrived = self._begin(shape, rows.dtype), rows.new_empty(shape)
        _multiply(rows, weight, offered)
        self._offer()
        for rank in self._others():
            arrival = self._pull(self._offered(rank)[self._rank], arrived[rank])
        arrived[self._rank].copy_(offered[self._rank])

        def wait() -> Tensor:
            torch.cuda.current_stream().wait_event(arrival)
            return arrived.sum(0)

        return wait

    def _others(self) -> list[int]:
        return [(self._rank + step) % self._ranks for step in range(1, self._ranks)]

    def _begin_gather(self, rows: Tensor) -> tuple[Tensor, list[Any]]:
        """Begin to pull the others' rows; return [ranks, *rows.shape] and an event of each, in order."""
        self._begin(rows.shape, rows.dtype, self._ranks).copy_(rows)
        self._offer()
        whole = rows.new_empty(self._ranks, *rows.shape)
        return whole, [self._pull(self._offered(rank), whole[rank]) for rank in self._others()]

    def release(self) -> None:
        """Free the memory until the next exchange."""
        torch.cuda.synchronize()
        dist.barrier(self._group)
        self._memory, self._sizes = [None, None], [0, 0]

    def _begin(self, shape: tuple[int, ...], dtype: torch.dtype, spare: int = 1) -> Tensor:
        """Return this rank's memory of the next turn, to fill it; reserve `spare` times as much.

        So both pieces have their last size in the forward pass of the first layer, when memory is free.
        """
        self._turn ^= 1
        size = spare * math.prod(shape) * dtype.itemsize
        if self._sizes[self._turn] < size:
            torch.cuda.synchronize()
            dist.barrier(self._group)  # nobody reads from the smaller memory any more
            self._memory[self._turn] = None
            self._memory[self._turn] = self._reserve(size, self._group)
            self._sizes[self._turn] = size
        self._shape, self._dtype, self._earlier = tuple(shape), dtype, self._last
        return self._offered(self._rank)

    def _offer(self) -> None:
        """Let others read this rank's memory of this turn; what they offered in the turn before is read."""
        stream = torch.cuda.current_stream()
        if self._earlier is not None:
            stream.wait_event(self._earlier)
        self._reserved().barrier(CHANNELS[self._turn], int(TIMEOUT.total_seconds() * 1e3))
        self._side.wait_stream(stream)

    def _pull(self, source: Tensor, to: Tensor) -> Any:
        with compat.on_stream(self._side):
            to.copy_(source)
        self._last = self._side.record_event()
        return self._last

    def _offered(self, rank: int) -> Tensor:
        return self._reserved().get_buffer(rank, self._shape, self._dtype)

    def _reserved(self) -> PeerMemory:
        memory = self._memory[self._turn]
        assert memory is not None  # `_begin` has reserved it
        return memory


def _multiply(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.mm(rows.reshape(-1, rows.shape[-1]), weight, out=out.view(-1, weight.shape[1]))


_connected: dict[dist.ProcessGroup, RowExchange | None] = {}


def connect(group: dist.ProcessGroup) -> RowExchange | None:
    """Return the group's exchange; None, and a warning, where its ranks cannot read one another's memory."""
    if group not in _connected:
        found = _connect(group)
        said: list[str] = [""] * group.size()
        dist.all_gather_object(said, found if isinstance(found, str) else "", group=group)
        refused = [each for each in said if each]
        if refused:
            log.warning("ranks exchange activations through NCCL: %s", refused[0])
        _connected[group] = None if refused or isinstance(found, str) else found
    return _connected[group]


def _connect(group: dist.ProcessGroup) -> RowExchange | str:
    """Return an exchange that has worked once, or why there is none."""
    nodes: list[str] = [""] * group.size()
    dist.all_gather_object(nodes, os.uname().nodename, group=group)
    if len(set(nodes)) > 1:
        return f"they are on the nodes {', '.join(sorted(set(nodes)))}"
    try:
        exchange, rows = RowExchange(group), torch.full((2, 8), float(group.rank()), device="cuda")
        numbers = torch.arange(group.size(), device="cuda")[:, None]
        right = [bool(exchange.gather(rows)().view(len(numbers), -1).eq(numbers).all()) for _ in CHANNELS]
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return exchange if all(right) else "the memory of other ranks does not hold what they wrote"


def release() -> None:
    """Free the memory of all exchanges until they are used again. All ranks must call this together."""
    for exchange in _connected.values():
        if exchange is not None:
            exchange.release()


def disconnect() -> None:
    """Forget all groups, which are about to end."""
    _connected.clear()
