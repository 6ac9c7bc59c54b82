"""Find what changed in tensors on CUDA; tensor_delta.py says what is stored, placing_kernels.py applies it.

Each tensor is read in blocks, once to count what each block will write, and once to write it. Between the
two, sums over the blocks of all tensors say where each block's part begins, so that the host waits once
for all tensors of a call, and for the work that was given to the GPU before. A block knows how far the last
change before it lies; whole runs of SKIP are part of the memory that the codes are filled with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8
REACH, SKIP = tl.constexpr(85), tl.constexpr(255)
"""Those of tensor_delta.py, which imports this module."""
FAR = tl.constexpr(-(1 << 20))
"""Stands for no change before this one in a block."""


@dataclass(frozen=True)
class Blocks:
    """Say which blocks of one long list belong to which tensor."""

    counts: list[int]
    starts: list[int]
    ends: Tensor
    """Last block of each tensor, int64 [tensors]."""
    own_starts: Tensor
    """First block of the tensor that a block belongs to, int64 [blocks]."""

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> "Blocks":
        """Divide tensors of so many elements; each has a block at least."""
        counts = [max(1, triton.cdiv(size, BLOCK)) for size in sizes]
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        table = torch.tensor([starts[:-1], counts, starts[1:]])
        if device.type == "cuda":  # a copy from memory that is not pinned would make the host wait
            table = table.pin_memory().to(device, non_blocking=True)
        own, repeats, following = table
        own = torch.repeat_interleave(own, repeats, output_size=starts[-1])
        return cls(counts, starts[:-1], following - 1, own)

    @property
    def size(self) -> int:
        return len(self.own_starts)

    def before(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of int64 values before each block within its tensor, and the sum of each tensor."""
        starts = values.cumsum(0) - values
        within = starts - starts[self.own_starts]
        return within, (within + values)[self.ends]


def encode_all(
    pairs: Sequence[tuple[Tensor, Tensor]], weights: Sequence[tuple[Tensor, Tensor, int]]
) -> list[tuple[Tensor, Tensor, Tensor] | None]:
    """Return codes, others and the growth of the digest of each pair, integers of contiguous tensors.

    None stands for a new tensor that takes less room than its changes. `weights` are those of a tensor's rows
    and columns in its digest, and how many columns it has.
    """
    device = pairs[0][0].device
    blocks = Blocks.of([new.numel() for _, new in pairs], device)
    counts = torch.empty(4, blocks.size, dtype=torch.int32, device=device)
    for (old, new), start, count in zip(pairs, blocks.starts, blocks.counts, strict=True):
        _count[(count,)](old, new, counts, start, new.numel(), blocks.size, BLOCK, num_warps=WARPS)
    first, last, inner, others = counts.to(torch.int64)
    base = torch.arange(blocks.size, device=device) * BLOCK
    before = _last_before(last >= 0, base + last)
    unchanged = base - torch.maximum(before, blocks.own_starts * BLOCK - 1) - 1  # up to the block's start
    codes = inner + torch.where(last >= 0, (unchanged + first) // REACH.value + 1, 0)
    code_starts, code_sizes = blocks.before(codes)
    other_starts, other_sizes = blocks.before(others)
    places = torch.stack([code_starts + unchanged // REACH.value, other_starts, unchanged % REACH.value])
    sizes = torch.stack([code_sizes, other_sizes]).t().tolist()  # the one wait
    grown = torch.empty(blocks.size, dtype=torch.int64, device=device)
    found: list[tuple[Tensor, Tensor] | None] = []
    for i, ((old, new), (size, other)) in enumerate(zip(pairs, sizes, strict=True)):
        if size + other * new.element_size() >= new.nbytes:
            found.append(None)
            continue
        written = torch.full((size,), SKIP.value, dtype=torch.uint8, device=device), new.new_empty(other)
        rows, columns, width = weights[i]
        inputs = old, new, *written, places, rows, columns, grown, blocks.starts[i], new.numel(), blocks.size
        mask, is_narrow = (1 << (8 * new.element_size())) - 1, width + BLOCK < 1 << 31
        _encode[(blocks.counts[i],)](*inputs, width, mask, is_narrow, BLOCK, num_warps=WARPS)
        found.append(written)
    growths = blocks.before(grown)[1].unbind()
    return [None if each is None else (*each, growth) for each, growth in zip(found, growths, strict=True)]


def _last_before(is_any: Tensor, last: Tensor) -> Tensor:
    """Return `last` of the nearest block before each block that has any change; -1 where there is none.

    A single thread block of the GPU would compute torch.cummax of so long a vector.
    """
    rank = is_any.cumsum(0)
    known = last.new_full((len(last) + 1,), -1)
    known.scatter_(0, rank * is_any, torch.where(is_any, last, -1))
    return known[rank - is_any.long()]


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether each contiguous tensor holds finite numbers only, bool [tensors]."""
    flags = torch.ones(len(tensors), dtype=torch.int32, device=tensors[0].device)
    for i, tensor in enumerate(tensors):
        bits, tensor = {2: torch.int16, 4: torch.int32}[tensor.element_size()], tensor.contiguous()
        infinity = int(torch.tensor(float("inf"), dtype=tensor.dtype).view(bits))
        grid = (max(1, triton.cdiv(tensor.numel(), BLOCK)),)
        _finite[grid](tensor.view(bits), flags, i, tensor.numel(), infinity, BLOCK, num_warps=WARPS)
    return flags.bool()


VARYING = ["start", "count", "blocks"]


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right)


@triton.jit
def _gaps(old, new, place, there, local, before):
    """Return how many elements without a change precede each one; `before` is where the last one lies."""
    inside = there & (local > 0)
    left_old = tl.load(old + place - 1, mask=inside, other=0)
    left_new = tl.load(new + place - 1, mask=inside, other=0)
    last = tl.where(local == 0, before, tl.where(left_old != left_new, local - 1, FAR))
    return local - tl.associative_scan(last, 0, _larger) - 1


@triton.jit(do_not_specialize=VARYING)
def _count(old, new, counts, start, count, blocks, block: tl.constexpr):
    """Note a block's first and last change, the codes of all but the first, and how many are others."""
    index = tl.program_id(0)
    local = tl.arange(0, block)
    place = index.to(tl.int64) * block + local
    there = place < count
    before = tl.load(old + place, mask=there, other=0)
    after = tl.load(new + place, mask=there, other=0)
    gap = _gaps(old, new, place, there, local, FAR)
    changed = before != after
    step = after - before
    is_other = changed & (step != 1) & (step != -1)
    is_inner = changed & (gap < block)
    at = counts + start + index
    wide = tl.cast(blocks, tl.int64)
    tl.store(at, tl.min(tl.where(changed, local, block), 0))
    tl.store(at + wide, tl.max(tl.where(changed, local, -1), 0))
    tl.store(at + 2 * wide, tl.sum(tl.where(is_inner, gap // REACH + 1, 0), 0))
    tl.store(at + 3 * wide, tl.sum(is_other.to(tl.int32), 0))


@triton.jit(do_not_specialize=[*VARYING, "columns"])
def _encode(
    old, new, codes, others, places, row_weights, column_weights, grown, start, count, blocks, columns,
    mask: tl.constexpr, is_narrow: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write a block's codes and others, and by how much it changes the digest."""
    index = tl.program_id(0)
    local = tl.arange(0, block)
    begin = index.to(tl.int64) * block
    place = begin + local
    there = place < count
    before = tl.load(old + place, mask=there, other=0)
    after = tl.load(new + place, mask=there, other=0)
    at = start + index.to(tl.int64)
    code_start = tl.load(places + at)
    other_start = tl.load(places + at + blocks)
    unchanged = tl.load(places + at + 2 * tl.cast(blocks, tl.int64)).to(tl.int32)
    gap = _gaps(old, new, place, there, local, -1 - unchanged)
    changed = before != after
    step = after - before
    kind = tl.where(step == 1, 0, tl.where(step == -1, 1, 2))
    is_other = changed & (kind == 2)
    # both counts of a block are below 2^16, so that one sum holds them
    both = tl.cumsum(tl.where(changed, gap // REACH + 1, 0) + (is_other.to(tl.int32) << 16), 0)
    code = kind * REACH + gap % REACH
    tl.store(codes + code_start + (both & 65535) - 1, code.to(tl.uint8), mask=changed)
    tl.store(others + other_start + (both >> 16) - 1, step, mask=is_other)
    row = begin // columns
    column = begin - row * columns
    if is_narrow:  # a division of 64 bits takes several times as long
        column = column.to(tl.int32)
    column += local
    row += column // columns
    column = column % columns
    weight = tl.load(row_weights + row, mask=changed, other=0)
    weight *= tl.load(column_weights + column, mask=changed, other=0)
    difference = (after.to(tl.int64) & mask) - (before.to(tl.int64) & mask)
    tl.store(grown + at, tl.sum(difference * weight, 0))


@triton.jit(do_not_specialize=["which", "count"])
def _finite(bits, flags, which, count, infinity: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(bits + place, mask=place < count, other=0)
    if tl.max(((value & infinity) == infinity).to(tl.int32), 0) == 1:
        tl.store(flags + which, 0)
