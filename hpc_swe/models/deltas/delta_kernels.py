"""Find what changed in tensors on CUDA; tensor_delta.py says what is stored, placing_kernels.py applies it.

Each tensor is read in blocks, once to count what each block will write, and once to write it. Between the
two, sums over the blocks of all tensors say where each block's part begins, so that the host waits once
for all tensors of a call, and for the work that was given to the GPU before. A block knows how far the last
change before it lies; whole runs of SKIP are part of the memory that the codes are filled with.

One launch reads all tensors of one width, whose addresses are in a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
    """First block of the tensor that a block belongs to, int64 [blocks]; `owners` has its number."""
    owners: Tensor

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> "Blocks":
        """Divide tensors of so many elements; each has a block at least."""
        counts = [max(1, -(-size // BLOCK)) for size in sizes]
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        first, repeats, following = on_device([starts[:-1], counts, starts[1:]], device)
        owners = torch.repeat_interleave(repeats, output_size=starts[-1])
        return cls(counts, starts[:-1], following - 1, first[owners], owners)

    @property
    def size(self) -> int:
        return len(self.own_starts)

    def before(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of int64 values before each block within its tensor, and the sum of each tensor."""
        starts = values.cumsum(0) - values
        within = starts - starts[self.own_starts]
        return within, (within + values)[self.ends]


BITS = {1: (torch.uint8, tl.uint8), 2: (torch.int16, tl.int16), 4: (torch.int32, tl.int32)}
"""Integers by their bytes, as torch and Triton name them."""
Row = tuple[int, int, int, int, int]
"""Describe a pair for kernels: both addresses, how many elements, how many columns, bytes of an element."""


@dataclass(frozen=True)
class _Width:
    """Say what one launch knows of its tensors, whose elements all have `size` bytes."""

    size: int
    is_aligned: bool
    """Whether addresses and numbers of elements are multiples of 16, so that threads load several at once."""
    is_narrow: bool
    """Whether 32 bits hold a column and a block together."""

    @classmethod
    def all(cls, rows: Sequence[Row]) -> "list[_Width]":
        """Return those that some tensors have."""
        found = []
        for size in sorted({row[4] for row in rows}):
            own = [row for row in rows if row[4] == size]
            is_aligned = not any((old | new | count) % 16 for old, new, count, _, _ in own)
            found.append(cls(size, is_aligned, max(row[3] for row in own) + BLOCK < 1 << 31))
        return found

    @property
    def constants(self) -> tuple[tl.dtype, int, bool, int]:
        return BITS[self.size][1], self.size, self.is_aligned, BLOCK


@dataclass(frozen=True)
class _Plan:
    """Know on the device how much each tensor writes, and where each of its blocks begins."""

    blocks: Blocks
    sizes: Tensor
    """int64 [3, tensors]: codes and others, and whether both are smaller than the tensor; else all are 0."""
    starts: Tensor
    """int64 [3, blocks]: where codes begin, -1 for none, others within a tensor, and the gap before them."""

    @classmethod
    def of(cls, blocks: Blocks, counts: Tensor, table: Tensor) -> "_Plan":
        """Add up what `_count` found, int32 [4, blocks], for tensors of a table of rows."""
        first, last, inner, others = counts.to(torch.int64)
        base = torch.arange(blocks.size, device=counts.device) * BLOCK
        before = _last_before(last >= 0, base + last)
        unchanged = base - torch.maximum(before, blocks.own_starts * BLOCK - 1) - 1  # up to the block's start
        codes = inner + torch.where(last >= 0, (unchanged + first) // REACH.value + 1, 0)
        (code_starts, code_sizes), (other_starts, other_sizes) = blocks.before(codes), blocks.before(others)
        is_smaller = code_sizes + other_sizes * table[:, 4] < table[:, 2] * table[:, 4]
        sizes = torch.stack([code_sizes, other_sizes, torch.ones_like(code_sizes)]) * is_smaller
        code_starts += (sizes[0].cumsum(0) - sizes[0])[blocks.owners] + unchanged // REACH.value
        code_starts = torch.where(is_smaller[blocks.owners], code_starts, -1)
        return cls(blocks, sizes, torch.stack([code_starts, other_starts, unchanged % REACH.value]))

    def places(self, is_own: Tensor) -> Tensor:
        """Return `starts` with places among the others of some tensors, bool [tensors]."""
        own = self.sizes[1] * is_own
        places = self.starts.clone()
        places[1] += (own.cumsum(0) - own)[self.blocks.owners]
        return places


def encode_all(
    pairs: Sequence[tuple[Tensor, Tensor]], columns: Sequence[int], weights: tuple[Tensor, Tensor]
) -> tuple[list[tuple[Tensor, Tensor] | None], Tensor]:
    """Return codes and others of each pair of contiguous tensors, and the growths of digests, int64 [pairs].

    None stands for a new tensor that takes less room than its changes. Codes lie one after another in one
    piece of memory, and so do others of one width. A digest sees each tensor as rows of so many `columns`;
    `weights` are those of the rows and of the columns, for the largest tensor.
    """
    device = pairs[0][0].device
    rows = [
        (old.data_ptr(), new.data_ptr(), new.numel(), max(1, width), new.element_size())
        for (old, new), width in zip(pairs, columns, strict=True)
    ]
    widths, table = _Width.all(rows), on_device(rows, device)
    blocks = Blocks.of([row[2] for row in rows], device)
    where = table, blocks.owners, blocks.own_starts, blocks.size
    counts = torch.empty(4, blocks.size, dtype=torch.int32, device=device)
    for width in widths:
        _count[(blocks.size,)](*where, counts, *width.constants, num_warps=WARPS)
    plan = _Plan.of(blocks, counts, table)
    sizes, other_sizes, is_smaller = plan.sizes.tolist()  # the one wait
    codes = torch.full((sum(sizes),), SKIP.value, dtype=torch.uint8, device=device)
    grown = torch.empty(blocks.size, dtype=torch.int64, device=device)
    others: dict[int, Sequence[Tensor]] = {}
    for width in widths:
        own = [count * (row[4] == width.size) for row, count in zip(rows, other_sizes, strict=True)]
        written = torch.empty(sum(own), dtype=BITS[width.size][0], device=device)
        outputs = codes, written, plan.places(table[:, 4] == width.size), *weights, grown
        _encode[(blocks.size,)](*where, *outputs, *width.constants, width.is_narrow, num_warps=WARPS)
        others[width.size] = written.split(own)
    parts = zip(codes.split(sizes), (others[row[4]][i] for i, row in enumerate(rows)), strict=True)
    found = [part if kept else None for part, kept in zip(parts, is_smaller, strict=True)]
    return found, blocks.before(grown)[1]


def on_device(numbers: "np.ndarray | Sequence[Sequence[int]]", device: torch.device) -> Tensor:
    """Return a table, int64, on a device; a copy from memory that is not pinned would make the host wait."""
    table = torch.from_numpy(np.asarray(numbers, dtype=np.int64))
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _last_before(is_any: Tensor, last: Tensor) -> Tensor:
    """Return `last` of the nearest block before each block that has any change; -1 where there is none.

    A single thread block of the GPU would compute torch.cummax of so long a vector.
    """
    rank = is_any.cumsum(0)
    known = last.new_full((len(last) + 1,), -1)
    known.scatter_(0, rank * is_any, torch.where(is_any, last, -1))
    return known[rank - is_any.long()]


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


@triton.jit
def _values(row, bits: tl.constexpr, is_aligned: tl.constexpr):
    """Return where the old and the new values of a row of the table lie, and how many there are."""
    old, new = tl.load(row).to(tl.pointer_type(bits)), tl.load(row + 1).to(tl.pointer_type(bits))
    count = tl.load(row + 2)
    if is_aligned:
        old, new, count = tl.multiple_of(old, 16), tl.multiple_of(new, 16), tl.multiple_of(count, 16)
    return old, new, count


@triton.jit(do_not_specialize=["blocks"])
def _count(
    table, owners, own_starts, blocks, counts,
    bits: tl.constexpr, size: tl.constexpr, is_aligned: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Note a block's first and last change, the codes of all but the first, and how many are others."""
    index = tl.program_id(0).to(tl.int64)
    row = table + 5 * tl.load(owners + index)
    if tl.load(row + 4) != size:
        return
    old, new, count = _values(row, bits, is_aligned)
    local = tl.arange(0, block)
    place = (index - tl.load(own_starts + index)) * block + local
    there = place < count
    before = tl.load(old + place, mask=there, other=0)
    after = tl.load(new + place, mask=there, other=0)
    gap = _gaps(old, new, place, there, local, FAR)
    changed = before != after
    step = after - before
    is_other = changed & (step != 1) & (before - after != 1)
    at = counts + index
    wide = tl.cast(blocks, tl.int64)
    tl.store(at, tl.min(tl.where(changed, local, block), 0))
    tl.store(at + wide, tl.max(tl.where(changed, local, -1), 0))
    tl.store(at + 2 * wide, tl.sum(tl.where(changed & (gap < block), gap // REACH + 1, 0), 0))
    tl.store(at + 3 * wide, tl.sum(is_other.to(tl.int32), 0))


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["codes", "others"])
def _encode(
    table, owners, own_starts, blocks, codes, others, places, row_weights, column_weights, grown,
    bits: tl.constexpr, size: tl.constexpr, is_aligned: tl.constexpr, block: tl.constexpr,
    is_narrow: tl.constexpr,
):  # fmt: skip
    """Write a block's codes and others, and by how much it changes the digest."""
    index = tl.program_id(0).to(tl.int64)
    row = table + 5 * tl.load(owners + index)
    if tl.load(row + 4) != size:
        return
    old, new, count = _values(row, bits, is_aligned)
    columns = tl.load(row + 3)
    local = tl.arange(0, block)
    begin = (index - tl.load(own_starts + index)) * block
    place = begin + local
    there = place < count
    before = tl.load(old + place, mask=there, other=0)
    after = tl.load(new + place, mask=there, other=0)
    code_start = tl.load(places + index)
    other_start = tl.load(places + index + blocks)
    unchanged = tl.load(places + index + 2 * tl.cast(blocks, tl.int64)).to(tl.int32)
    gap = _gaps(old, new, place, there, local, -1 - unchanged)
    changed = before != after
    written = changed & (code_start >= 0)
    step = after - before
    kind = tl.where(step == 1, 0, tl.where(before - after == 1, 1, 2))
    is_other = written & (kind == 2)
    # both counts of a block are below 2^16, so that one sum holds them
    both = tl.cumsum(tl.where(changed, gap // REACH + 1, 0) + (is_other.to(tl.int32) << 16), 0)
    code = kind * REACH + gap % REACH
    tl.store(codes + code_start + (both & 65535) - 1, code.to(tl.uint8), mask=written)
    tl.store(others + other_start + (both >> 16) - 1, step, mask=is_other)
    line = begin // columns
    column = begin - line * columns
    if is_narrow:  # a division of 64 bits takes several times as long
        column, columns = column.to(tl.int32), columns.to(tl.int32)
    column += local
    line += column // columns
    weight = tl.load(row_weights + line, mask=changed, other=0)
    weight *= tl.load(column_weights + column % columns, mask=changed, other=0)
    mask: tl.constexpr = (1 << (8 * size)) - 1
    difference = (after.to(tl.int64) & mask) - (before.to(tl.int64) & mask)
    tl.store(grown + index, tl.sum(difference * weight, 0))
