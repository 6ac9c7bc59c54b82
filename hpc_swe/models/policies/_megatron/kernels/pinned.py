"""Allocate pinned host memory of exactly the size that is asked for.

torch's own allocator of pinned memory rounds each size up to a power of two, which for the state of a large
optimizer is tens of GiB.
"""

import contextlib
import math
import mmap
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from hpc_swe.base.errors import NodeError, ProtocolError
from hpc_swe.cluster import cgroups
from hpc_swe.models.costs import GIB
from hpc_swe.models.policies.base import Ranks

ALIGNED = 64  # bytes; each place of a room starts at a multiple of this


@dataclass(frozen=True)
class MemoryClaim:
    """Say how much host memory a process needs of its node."""

    node: str
    needed: int
    free: int
    """Bytes, as `needed` is, that the node and the control groups of the process can give now."""
    pinned: int = 0
    """Bytes that the process has pinned before."""
    limit: int = cgroups.NO_LIMIT
    """Bytes that the job may use on the node, by Slurm's word, whether or not a control group enforces it."""


class _Pages(mmap.mmap):
    """Count the pages that this process has pinned, and unpin the pages before they are unmapped.

    CUDA would take the next memory at their address for pinned memory of their size, and refuse to copy it.
    """

    pinned: ClassVar[int] = 0
    """Bytes of all pages together."""
    address = 0
    """Where CUDA pinned them; 0 as long as it has not."""
    device = 0
    """The GPU of the thread that pinned them; the one that frees them may have another."""

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()  # no copy may be under way
                torch.cuda.cudart().cudaHostUnregister(self.address)
            _Pages.pinned -= len(self)


def _zeros(size: int) -> Tensor:
    """Return `size` bytes of zeros, pinned where there is CUDA; raise NodeError if that is refused.

    A process that is forked from this one does not see the memory, because the system would copy pinned pages
    for it.
    """
    try:
        return _pin(size) if torch.cuda.is_available() and size else torch.zeros(size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise NodeError(f"{size / GIB:.1f} GiB of host memory are refused: {error}") from error


def _pin(size: int) -> Tensor:
    pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # there are far fewer of them to pin
    pages.madvise(mmap.MADV_DONTFORK)
    # Several threads touch the pages here; the driver would do so with one.
    tensor = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    refusal = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
    if refusal:
        raise NodeError(f"CUDA refuses to pin {size / GIB:.1f} GiB of host memory: error {refusal}")
    pages.address, pages.device = tensor.data_ptr(), torch.cuda.current_device()
    _Pages.pinned += size
    return tensor


class HostRoom:
    """Give tensors places in one piece of host memory, one after another."""

    def __init__(self, key: str, memory: Tensor) -> None:
        """Divide `memory`, uint8 [bytes], which is zero and was taken for `key` of the configuration."""
        self._key, self._memory, self._taken, self.nbytes = key, memory, 0, memory.numel()

    def place(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next place, a tensor of zeros of this size; `room_for` says what it takes.

        Raise ProtocolError if the room has less than that left.
        """
        first, count = self._taken, math.prod(size) * dtype.itemsize
        self._taken += room_for([count])
        if self._taken > self.nbytes:
            raise ProtocolError(
                f"{self._key}: a tensor of {count} bytes does not fit into its {self.nbytes} bytes of host "
                f"memory, of which {first} are taken; take `room_for` all tensors"
            )
        return self._memory[first : first + count].view(dtype).view(tuple(size))

    def ahead(self, groups: Iterable[Sequence[Tensor]], device: torch.device) -> Iterator[list[Tensor]]:
        """Yield the values of each group of places on a device; those of the next group are copied meanwhile.

        A group is copied in one piece, and must have places that were given one after another. On a CPU the
        values are the places themselves.
        """
        if device.type == "cpu":
            yield from map(list, groups)
            return
        stream, user = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        coming: deque[tuple[list[Tensor], torch.cuda.Event]] = deque()
        try:
            for places in groups:
                coming.append(self._copy(places, stream, user))
                if len(coming) > 1:
                    yield _arrived(coming, user)
            while coming:
                yield _arrived(coming, user)
        finally:
            user.wait_stream(stream)  # before memory is used again into which it still copies

    def _copy(
        self, places: Sequence[Tensor], stream: "torch.cuda.Stream", user: "torch.cuda.Stream"
    ) -> tuple[list[Tensor], "torch.cuda.Event"]:
        piece = self.piece(places)
        copied = torch.empty_like(piece, device=stream.device)
        stream.wait_stream(user)  # which may still read what was in the same memory, or write the places
        with torch.cuda.stream(stream):
            copied.copy_(piece, non_blocking=True)
        return views(copied, places), stream.record_event()

    def piece(self, places: Sequence[Tensor]) -> Tensor:
        """Return the bytes, uint8, of places that were given one after another, and those between them."""
        begin, end = _start(places[0]), _start(places[-1]) + room_for([places[-1].nbytes])
        origin = self._memory.storage_offset()
        return self._memory[begin - origin : end - origin]


def views(copied: Tensor, places: Sequence[Tensor]) -> list[Tensor]:
    """Return what are `places` of a room in a copy of their piece."""
    begin, typed = _start(places[0]), {dtype: copied.view(dtype) for dtype in {each.dtype for each in places}}
    return [
        typed[each.dtype].as_strided(
            each.shape, each.stride(), each.storage_offset() - begin // each.itemsize
        )
        for each in places
    ]


def _start(place: Tensor) -> int:
    return int(place.storage_offset() * place.itemsize)


def _arrived(
    coming: "deque[tuple[list[Tensor], torch.cuda.Event]]", user: "torch.cuda.Stream"
) -> list[Tensor]:
    found, event = coming.popleft()
    user.wait_event(event)
    return found


def room_for(sizes: Iterable[int]) -> int:
    """Return how many bytes tensors of so many bytes take."""
    return sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


def take(key: str, needed: int, ranks: Ranks, remedy: str) -> HostRoom:
    """Take so many bytes; raise NodeError on all ranks if one of them cannot have them.

    All ranks must call this together: of a rank that is refused memory that it takes alone, the others would
    not learn, and wait for it. Memory is measured when all have come here, with what they freed before.
    """
    ranks.gather(None)
    if found := refusal(key, ranks.gather(claim(needed)), remedy):
        raise NodeError(found)
    taken, failure = None, ""
    try:
        taken = _zeros(needed)
    except NodeError as error:  # the others must learn it before they go on
        failure = f"rank {ranks.rank} of {os.uname().nodename}: {error}"
    failures = [each for each in ranks.gather(failure) if each]
    if taken is None or failures:
        raise NodeError(f"{key}: {failures[0]}; {remedy}")
    return HostRoom(key, taken)


def claim(needed: int) -> MemoryClaim:
    """Return the claim of this process for so many bytes."""
    free = min(available(Path("/proc/meminfo").read_text()), cgroups.memory_left(cgroups.own_limit_files()))
    return MemoryClaim(os.uname().nodename, needed, free, _Pages.pinned, slurm_limit(os.environ))


def available(meminfo: str) -> int:
    """Return how many bytes the node can give without swapping."""
    line = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    return 1024 * int(line.split()[1])


def slurm_limit(environment: Mapping[str, str]) -> int:
    """Return how many bytes Slurm lets this job use on a node; NO_LIMIT where it gave the whole node."""
    return int(environment.get("SLURM_MEM_PER_NODE", "0")) * 2**20 or cgroups.NO_LIMIT


def refusal(key: str, claims: Sequence[MemoryClaim], remedy: str) -> str | None:
    """Return why the claims of all processes are too large for a node, with the key that asks; or None.

    `remedy` says what a person can do instead of asking Slurm for more memory.
    """
    for node in sorted({each.node for each in claims}):
        own = [each for each in claims if each.node == node]
        needed, pinned = sum(each.needed for each in own), sum(each.pinned for each in own)
        free = min(min(each.free for each in own), max(0, min(each.limit for each in own) - pinned))
        if needed > free:
            return (
                f"{key}: the {len(own)} processes of {node} need {needed / GIB:.1f} GiB of host memory, of "
                f"which {free / GIB:.1f} are free; {remedy}, or ask [executor] for more memory"
            )
    return None
