"""Add up the digest of a tensor on CUDA in one pass; tensor_delta.py says what it is."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4
BLOCK = 1024


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
