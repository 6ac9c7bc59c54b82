"""Add up digests of tensors on CUDA in one pass; tensor_delta.py says what they are.

`RectangleSums` adds up those of many rectangles with one kernel: a table on the device says where each lies,
and each program adds up a tile of one of them.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4
BLOCK = 1024
TILE = 16, 2048
"""Most rows and columns that one program of `RectangleSums` adds up."""
TILE_BLOCK = 256
"""Columns of a tile that are in registers at one time."""
VECTOR = 16
"""Bytes that a thread loads at once, where all rows begin and end at multiples of them."""
TYPES = {1: tl.uint8, 2: tl.int16, 4: tl.int32}
PlacedView = tuple[Tensor, tuple[int, int]]
"""A view [rows, columns] of memory, and the row and column of a tensor at which it begins."""


class RectangleSums:
    """Add up the digests of rectangles that stay where they are in memory."""

    def __init__(self, parts: Sequence[PlacedView]) -> None:
        """Take parts of tensors of 1, 2 or 4 bytes a value, all on one device."""
        self._views = [view for view, _ in parts]  # the tables point to their memory
        self.shape = [max(at[axis] + view.shape[axis] for view, at in parts) for axis in (0, 1)]
        """Rows and columns of which weights are needed."""
        self.left_out: list[int] = []
        """The parts whose rows are not dense, which the kernel does not read."""
        lists: dict[tuple[int, int], list[int]] = {}
        for i, view in enumerate(self._views):
            if view.stride(1) != 1 and view.shape[1] > 1:
                self.left_out.append(i)
            else:
                lists.setdefault((view.element_size(), _unit(view)), []).append(i)
        self._tiles = [_Tiles(parts, chosen, *kind) for kind, chosen in lists.items()]

    def add_up(self, row_weights: Tensor, column_weights: Tensor) -> Tensor:
        """Return the digest of each part, int64 [parts]; 0 stands for those that are left out.

        The weights are int64 vectors for `shape`.
        """
        found = row_weights.new_zeros(len(self._views))
        for tiles in self._tiles:
            found[tiles.which] = tiles.add_up(row_weights, column_weights)
        return found


class _Tiles:
    """Divide parts into tiles, each of which one program adds up.

    They have one element size in bytes, and one unit: rows begin and end at multiples of so many values.
    """

    def __init__(self, parts: Sequence[PlacedView], which: Sequence[int], size: int, unit: int) -> None:
        self._kind = TYPES[size], size, unit, (1 << (8 * size)) - 1
        table, counts, count = [], [], 0
        for view, at in (parts[i] for i in which):
            rows, columns = view.shape
            step, across = view.stride(0) if rows > 1 else 0, triton.cdiv(columns, TILE[1])
            table.append([view.data_ptr(), step // unit, rows, columns // unit, *at, count, across])
            counts.append(triton.cdiv(rows, TILE[0]) * across)
            count += counts[-1]
        device, repeats = parts[0][0].device, torch.tensor(counts)
        self.which = torch.tensor(which, device=device)
        self._table = torch.from_numpy(np.array(table, dtype=np.int64)).t().contiguous().to(device)
        """int64 [8, parts]: pointer, row stride, rows, columns, first row and column, first tile, and tiles
        beside one another; stride and columns are in units."""
        self._own = torch.arange(len(table), dtype=torch.int32).repeat_interleave(repeats).to(device)
        """The part that a tile belongs to, int32 [tiles]."""
        self._ends = repeats.cumsum(0).to(device)

    def add_up(self, row_weights: Tensor, column_weights: Tensor) -> Tensor:
        """Return the digest of each part, int64 [parts]."""
        found = row_weights.new_zeros(len(self._own) + 1)
        inputs = self._table, self._table.shape[1], self._own, row_weights, column_weights, found
        _sum_tiles[(len(self._own),)](*inputs, *self._kind, *TILE, TILE_BLOCK, num_warps=8)
        return found.cumsum(0)[self._ends].diff(prepend=found[:1])  # exact, for all is modulo 2^64


def _unit(view: Tensor) -> int:
    """Return how many values a thread may load at once; 1 where rows are not aligned."""
    size = view.element_size()
    step = view.stride(0) * size if len(view) > 1 else 0
    is_aligned = not any(each % VECTOR for each in (view.data_ptr(), step, view.shape[1] * size))
    return VECTOR // size if is_aligned else 1


def weighted_sums(bits: Tensor, row_weights: Tensor, column_weights: Tensor) -> Tensor:
    """Return, int64 [rows], the share of each row of `bits`, integers [rows, columns] with dense rows."""
    rows, columns = bits.shape
    sums = torch.empty(rows, dtype=torch.int64, device=bits.device)
    mask = (1 << (8 * bits.element_size())) - 1
    inputs = bits, bits.stride(0), row_weights, column_weights, sums, rows, columns
    _weighted_sums[(triton.cdiv(rows, ROWS),)](*inputs, mask, ROWS, BLOCK, num_warps=8)
    return sums


@triton.jit
def _weighted_sums(
    bits,
    stride,
    row_weights,
    column_weights,
    sums,
    rows,
    columns,
    mask: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0) * group + tl.arange(0, group)
    is_row = row < rows
    starts = row.to(tl.int64) * stride
    total = tl.zeros((group, block), tl.int64)
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        is_column = column < columns
        place = starts[:, None] + column[None, :]
        value = tl.load(bits + place, mask=is_row[:, None] & is_column[None, :], other=0)
        weight = tl.load(column_weights + column, mask=is_column, other=0)
        total += (value.to(tl.int64) & mask) * weight[None, :]
    found = tl.sum(total, 1) * tl.load(row_weights + row, mask=is_row, other=0)
    tl.store(sums + row, found, mask=is_row)


@triton.jit(do_not_specialize=["table", "count", "own", "row_weights", "column_weights", "found"])
def _sum_tiles(
    table, count, own, row_weights, column_weights, found,
    dtype: tl.constexpr, size: tl.constexpr, unit: tl.constexpr, mask: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    count = tl.cast(count, tl.int64)
    at = table + tl.load(own + index)
    bits = tl.load(at).to(tl.pointer_type(dtype))
    stride = tl.load(at + count) * unit
    rows = tl.load(at + 2 * count)
    columns = tl.load(at + 3 * count) * unit
    tile = index - tl.load(at + 6 * count)
    across = tl.load(at + 7 * count)
    row = tile // across * height + tl.arange(0, height)
    is_row = row < rows
    row_weight = tl.load(row_weights + tl.load(at + 4 * count) + row, mask=is_row, other=0)
    column_weights += tl.load(at + 5 * count)
    begin = tile % across * width
    total = tl.zeros((height, block), tl.int64)
    for first in range(begin, tl.minimum(begin + width, columns), block):
        column = first + tl.arange(0, block)
        is_column = column < columns
        # the compiler cannot know the alignment of a pointer that comes from a table
        place = tl.multiple_of(bits + row[:, None] * stride + column[None, :], (size, size * unit))
        value = tl.load(place, mask=is_row[:, None] & is_column[None, :], other=0)
        weight = tl.load(column_weights + column, mask=is_column, other=0)
        total += (value.to(tl.int64) & mask) * weight[None, :]
    tl.store(found + 1 + index, tl.sum(tl.sum(total, 1) * row_weight, 0))
