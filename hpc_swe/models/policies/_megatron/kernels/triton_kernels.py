"""Compute in one pass each, on CUDA, what the compiler of torch needs several for; kernels.py says what.

Numbers are read in the model's type, computed in float32, and rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SWIGLU_BLOCK = 2048
PROGRAMS = 132 * 8
"""Number of programs that share the tokens where each adds up a part of a weight's gradient."""


def rotated_heads(
    eps: float, parts: Tensor, cosines: Tensor, sines: Tensor, *weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value for `parts` [tokens, groups, heads / groups + 2, d]."""
    tokens, groups, size, d = parts.shape
    query = parts.new_empty(tokens, groups * (size - 2), d)
    key, value = parts.new_empty(tokens, groups, d), parts.new_empty(tokens, groups, d)
    inputs = parts, *(weights or (parts, parts)), cosines, sines, query, key, value, eps
    _heads_forward[(tokens,)](*inputs, *_constants(parts, weights), num_warps=8)
    return query, key, value


def rotated_heads_backward(
    grads: tuple[Tensor, ...], eps: float, parts: Tensor, cosines: Tensor, sines: Tensor, *weights: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of `parts` and of the weights, if there are any."""
    tokens, slope = len(parts), torch.empty_like(parts)
    sums = torch.empty(min(tokens, PROGRAMS), 2, parts.shape[-1], device=parts.device)
    inputs = parts, *(weights or (parts, parts)), cosines, sines, *(each.contiguous() for each in grads)
    _heads_backward[(len(sums),)](*inputs, slope, sums, eps, tokens, *_constants(parts, weights), num_warps=8)
    return slope, *sums.sum(0).to(parts.dtype)[: len(weights)]


def residual_norm_backward(
    residual: Tensor, grad: Tensor, hidden: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `hidden` and of the weight; `residual` is the one that bypasses the norm."""
    width, slope = hidden.shape[-1], torch.empty_like(hidden)
    rows = hidden.numel() // width
    sums = torch.empty(min(rows, PROGRAMS), width, device=hidden.device)
    inputs = residual.contiguous(), grad.contiguous(), hidden, weight, slope, sums, eps, rows
    _norm_backward[(len(sums),)](*inputs, width, triton.next_power_of_2(width), num_warps=8)
    return slope, sums.sum(0).to(weight.dtype)


def _constants(parts: Tensor, weights: tuple[Tensor, ...]) -> tuple[int, ...]:
    _, groups, size, d = parts.shape
    return (
        groups,
        size,
        d,
        bool(weights),
        triton.next_power_of_2(groups * size),
        triton.next_power_of_2(d // 2),
    )


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    width = gate_up.shape[-1] // 2
    product = gate_up.new_empty(*gate_up.shape[:-1], width)
    _swiglu_forward[_swiglu_grid(product)](gate_up, product, width, SWIGLU_BLOCK, num_warps=8)
    return product


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of `gate_up`."""
    slope, grad = torch.empty_like(gate_up), grad.contiguous()
    _swiglu_backward[_swiglu_grid(grad)](gate_up, grad, slope, grad.shape[-1], SWIGLU_BLOCK, num_warps=8)
    return slope


def add_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Return for each token the sum of the rows at `places` [tokens, k], -1 for none."""
    (tokens, k), width = places.shape, rows.shape[1]
    rows, sums = rows.contiguous(), rows.new_empty(tokens, width)
    block = min(2048, triton.next_power_of_2(width))
    _add_rows[tokens, triton.cdiv(width, block)](rows, places, sums, width, k, block, num_warps=8)
    return sums


def _swiglu_grid(product: Tensor) -> tuple[int, int]:
    width = product.shape[-1]
    return product.numel() // width, triton.cdiv(width, SWIGLU_BLOCK)


@triton.jit
def _add_rows(rows, places, sums, width, k: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    there = column < width
    total = tl.zeros((block,), tl.float32)
    for i in tl.static_range(k):
        place = tl.load(places + token * k + i).to(tl.int64)
        total += tl.load(rows + place * width + column, there & (place >= 0), 0.0).to(tl.float32)
    tl.store(sums + token * width + column, total, there)


@triton.jit
def _swiglu_forward(both, product, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    there = column < width
    at = row * 2 * width + column
    gate = tl.load(both + at, there, 0.0).to(tl.float32)
    up = tl.load(both + at + width, there, 0.0).to(tl.float32)
    tl.store(product + row * width + column, gate / (1.0 + tl.exp(-gate)) * up, there)


@triton.jit
def _swiglu_backward(both, grad, slope, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    there = column < width
    at = row * 2 * width + column
    gate = tl.load(both + at, there, 0.0).to(tl.float32)
    up = tl.load(both + at + width, there, 0.0).to(tl.float32)
    dy = tl.load(grad + row * width + column, there, 0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    tl.store(slope + at, dy * up * (sigmoid + silu * (1.0 - sigmoid)), there)
    tl.store(slope + at + width, dy * silu, there)


@triton.jit
def _norm_backward(
    residual, grad, hidden, weight, slope, sums, eps, rows, width: tl.constexpr, tile: tl.constexpr
):
    """Do every n-th row, and add up the gradient of the weight over these."""
    column = tl.arange(0, tile)
    there = column < width
    scales = tl.load(weight + column, there, 0.0).to(tl.float32)
    total = tl.zeros((tile,), tl.float32)
    wide = tl.full((tile,), width, tl.int64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row * wide + column
        x = tl.load(hidden + at, there, 0.0).to(tl.float32)
        dy = tl.load(grad + at, there, 0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        x *= scale
        total += dy * x
        dy *= scales
        dx = scale * (dy - x * (tl.sum(dy * x, 0) / width))
        tl.store(slope + at, dx + tl.load(residual + at, there, 0.0).to(tl.float32), there)
    tl.store(sums + tl.program_id(0) * width + column, total, there)


@triton.jit
def _heads_forward(
    parts, of_query, of_key, cosines, sines, query, key, value, eps,
    groups: tl.constexpr, size: tl.constexpr, d: tl.constexpr, is_normed: tl.constexpr,
    heads_tile: tl.constexpr, half_tile: tl.constexpr,
):  # fmt: skip
    """Do one token; rows of the tile are heads, in the order of `parts`, and columns one half of them."""
    token = tl.program_id(0)
    head, column = tl.arange(0, heads_tile)[:, None], tl.arange(0, half_tile)[None, :]
    group, index = (head // size).to(tl.int64), head % size
    there = (head < groups * size) & (column < d // 2)
    row = token * groups + group
    source = parts + (row * size + index) * d + column
    left = tl.load(source, there, 0.0).to(tl.float32)
    right = tl.load(source + d // 2, there, 0.0).to(tl.float32)
    cosine, sine = _angles(cosines, sines, token, column, d)
    cosine_right, sine_right = _angles(cosines, sines, token, column + d // 2, d)
    is_value = index == size - 1
    if is_normed:
        scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / d + eps)[:, None]
        scale = tl.where(is_value, 1.0, scale)
        left *= scale * _weights(of_query, of_key, index, size, column, d)
        right *= scale * _weights(of_query, of_key, index, size, column + d // 2, d)
    target = _place(query, key, value, row, index, size, d) + column
    tl.store(target, tl.where(is_value, left, left * cosine - right * sine), there)
    tl.store(target + d // 2, tl.where(is_value, right, right * cosine_right + left * sine_right), there)


@triton.jit
def _heads_backward(
    parts, of_query, of_key, cosines, sines, query, key, value, slope, sums, eps, tokens,
    groups: tl.constexpr, size: tl.constexpr, d: tl.constexpr, is_normed: tl.constexpr,
    heads_tile: tl.constexpr, half_tile: tl.constexpr,
):  # fmt: skip
    """Do every n-th token, and add up the gradients of the weights over these."""
    head, column = tl.arange(0, heads_tile)[:, None], tl.arange(0, half_tile)[None, :]
    group, index = (head // size).to(tl.int64), head % size
    there = (head < groups * size) & (column < d // 2)
    is_value = index == size - 1
    if is_normed:
        weight = _weights(of_query, of_key, index, size, column, d)
        weight_right = _weights(of_query, of_key, index, size, column + d // 2, d)
        total = tl.zeros((heads_tile, half_tile), tl.float32)
        total_right = tl.zeros((heads_tile, half_tile), tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = token * groups + group
        source = _place(query, key, value, row, index, size, d) + column
        dy = tl.load(source, there, 0.0).to(tl.float32)
        dy_right = tl.load(source + d // 2, there, 0.0).to(tl.float32)
        cosine, sine = _angles(cosines, sines, token, column, d)
        cosine_right, sine_right = _angles(cosines, sines, token, column + d // 2, d)
        left = tl.where(is_value, dy, dy * cosine + dy_right * sine_right)
        right = tl.where(is_value, dy_right, dy_right * cosine_right - dy * sine)
        place = (row * size + index) * d + column
        if is_normed:
            x = tl.load(parts + place, there, 0.0).to(tl.float32)
            x_right = tl.load(parts + place + d // 2, there, 0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(x_right * x_right, 1)) / d + eps)[:, None]
            x *= scale
            x_right *= scale
            total += left * x
            total_right += right * x_right
            weighted, weighted_right = left * weight, right * weight_right
            mean = (tl.sum(weighted * x, 1) + tl.sum(weighted_right * x_right, 1))[:, None] / d
            left = tl.where(is_value, left, scale * (weighted - x * mean))
            right = tl.where(is_value, right, scale * (weighted_right - x_right * mean))
        tl.store(slope + place, left, there)
        tl.store(slope + place + d // 2, right, there)
    if is_normed:
        target, there = sums + tl.program_id(0) * 2 * d + column, column < d // 2
        is_query, is_key = index < size - 2, index == size - 2
        tl.store(target, tl.sum(tl.where(is_query, total, 0.0), 0)[None, :], there)
        tl.store(target + d // 2, tl.sum(tl.where(is_query, total_right, 0.0), 0)[None, :], there)
        tl.store(target + d, tl.sum(tl.where(is_key, total, 0.0), 0)[None, :], there)
        tl.store(target + d + d // 2, tl.sum(tl.where(is_key, total_right, 0.0), 0)[None, :], there)


@triton.jit
def _place(query, key, value, row, index, size: tl.constexpr, d: tl.constexpr):
    """Return where each head of a token begins in the three tensors."""
    of_group = tl.where(index == size - 2, key + row * d, value + row * d)
    return tl.where(index < size - 2, query + (row * (size - 2) + index) * d, of_group)


@triton.jit
def _weights(of_query, of_key, index, size: tl.constexpr, column, d: tl.constexpr):
    """Return the weight of each head's norm; it is 1 for values."""
    query = tl.load(of_query + column, column < d, 0.0).to(tl.float32)
    key = tl.load(of_key + column, column < d, 0.0).to(tl.float32)
    return tl.where(index < size - 2, query, tl.where(index == size - 2, key, 1.0))


@triton.jit
def _angles(cosines, sines, token, column, d: tl.constexpr):
    cosine = tl.load(cosines + token * d + column, column < d, 0.0).to(tl.float32)
    return cosine, tl.load(sines + token * d + column, column < d, 0.0).to(tl.float32)
