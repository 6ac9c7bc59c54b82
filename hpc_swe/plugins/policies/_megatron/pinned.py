"""Allocate pinned host memory of exactly the size that is asked for.

torch's own allocator of pinned memory rounds each size up to a power of two, which for the state of a large
optimizer is tens of GiB.
"""

import contextlib
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hpc_swe.errors import NodeError
from hpc_swe.plugins.costs import GIB


@dataclass(frozen=True)
class MemoryClaim:
    """Say how much host memory a process needs of its node."""

    node: str
    needed: int
    free: int
    """Bytes, as `needed` is, that the node can give."""


class _Pages(mmap.mmap):
    """Unpin the pages before they are unmapped.

    CUDA would take the next memory at their address for pinned memory of their size, and refuse to copy it.
    """

    address = 0
    """Where CUDA pinned them; 0 as long as it has not."""

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.synchronize()  # no copy may be under way
            torch.cuda.cudart().cudaHostUnregister(self.address)


def zeros(count: int, dtype: torch.dtype) -> Tensor:
    """Return a host tensor [count] of zeros, pinned where there is CUDA; raise NodeError if that is refused.

    A process that is forked from this one does not see the memory, because the system would copy pinned pages
    for it.
    """
    if not torch.cuda.is_available() or not count:
        return torch.zeros(count, dtype=dtype)
    size = count * dtype.itemsize
    pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # there are far fewer of them to pin
    pages.madvise(mmap.MADV_DONTFORK)
    # Several threads touch the pages here; the driver would do so with one.
    tensor = torch.frombuffer(pages, dtype=dtype).zero_()
    refusal = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
    if refusal:
        raise NodeError(f"CUDA refuses to pin {size / GIB:.1f} GiB of host memory: error {refusal}")
    pages.address = tensor.data_ptr()
    return tensor


def available(meminfo: str, environment: Mapping[str, str]) -> int:
    """Return how many bytes of host memory this job can have: those that are free, or its limit in Slurm."""
    free = next(line.split()[1] for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    limit = environment.get("SLURM_MEM_PER_NODE", "0")  # in MiB; 0 is the whole node
    return min(1024 * int(free), int(limit) * 2**20 or 2**63)


def claim(needed: int) -> MemoryClaim:
    """Return the claim of this process for so many bytes."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    return MemoryClaim(os.uname().nodename, needed, available(meminfo, os.environ))


def refusal(key: str, claims: Sequence[MemoryClaim], remedy: str) -> str | None:
    """Return why the claims of all processes are too large for a node, with the key that asks; or None.

    `remedy` says what a person can do instead of asking Slurm for more memory.
    """
    for node in sorted({each.node for each in claims}):
        own = [each for each in claims if each.node == node]
        needed, free = sum(each.needed for each in own), min(each.free for each in own)
        if needed > free:
            return (
                f"{key}: the {len(own)} processes of {node} need {needed / GIB:.1f} GiB of host memory, of "
                f"which {free / GIB:.1f} are free; {remedy}, or ask [executor] for more memory"
            )
    return None
