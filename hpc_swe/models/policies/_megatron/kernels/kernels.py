"""Compute the elementwise parts of a layer: norms, rotary positions and SwiGLU.

Each is one node of autograd's graph, which keeps the function's inputs and nothing else. A CPU runs the plain
functions below, and CUDA the kernels of triton_kernels.py.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.func import vjp


class RMSNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """Adapt torch's RMSNorm to the arguments with which Megatron builds norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # then each rank has a part of its gradient

    @property
    def factor(self) -> Tensor:
        """Return what normed values are multiplied by, in the type in which that is done."""
        return self.weight


class ShiftedNorm(RMSNorm):
    """Multiply by one plus the weight, in float32."""

    @property
    def factor(self) -> Tensor:
        return 1 + self.weight.float()

    def forward(self, hidden: Tensor) -> Tensor:
        return _rms_norm(hidden, self.factor, self.eps)


def residual_norm(norm: RMSNorm, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return `hidden` for the sum, and normed for what is added; their gradients meet in one kernel."""
    if not hidden.is_cuda:
        return hidden, norm(hidden)
    residual, normed = _ResidualNorm.apply(hidden, norm.factor, norm.eps)
    return residual, normed


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., f], for gate and up side by side, [..., 2 f]."""
    product: Tensor = _Swiglu.apply(gate_up)
    return product


def weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """Return `rows` [n, width] times float32 `weights` [n], in the type of the rows."""
    found: Tensor = _Weighted.apply(rows, weights)
    return found


def add_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Return the sum of some rows for each token; `places` int32 [tokens, k] has their numbers, or -1."""
    if rows.is_cuda:
        return _triton().add_rows(rows, places)
    chosen = F.pad(rows, (0, 0, 0, 1)).index_select(0, places.flatten() % (len(rows) + 1))
    return chosen.unflatten(0, places.shape).sum(1)


def rotated_heads(
    mixed: Tensor, groups: int, norms: tuple[RMSNorm, RMSNorm] | None, cosines: Tensor, sines: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [tokens, heads, d], and key and value [tokens, groups, d].

    Query and key are normed if there are `norms`, then rotated. `mixed` [tokens, (heads + 2 groups) * d] has
    each group's queries, key and value side by side; `cosines` and `sines` are [tokens, 1, d].
    """
    parts = mixed.unflatten(1, (groups, -1, cosines.shape[-1]))
    weights = [norm.weight for norm in norms or ()]
    eps = norms[0].eps if norms else 0.0
    query, key, value = _RotatedHeads.apply(eps, parts, cosines, sines, *weights)
    return query, key, value


def gated_heads(
    mixed: Tensor, groups: int, norms: tuple[RMSNorm, RMSNorm], cosines: Tensor, sines: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query [tokens, heads, d], key and value [tokens, groups, d], and gate [tokens, 1, heads * d].

    `mixed` [tokens, (2 heads + 2 groups) * d] has for each group its queries, each with its gate, then its
    key and its value. `cosines` and `sines` [tokens, 1, n] turn the first n dimensions of query and key.
    """
    parts, width = mixed.unflatten(1, (groups, -1, len(norms[0].weight))), cosines.shape[-1]
    query, gate = parts[:, :, :-2].flatten(1, 2).unflatten(1, (-1, 2)).unbind(2)
    normed = [norm(states) for norm, states in zip(norms, (query, parts[:, :, -2]), strict=True)]
    query, key = (
        torch.cat((_rotate(states[..., :width], cosines, sines), states[..., width:]), -1)
        for states in normed
    )
    return query, key, parts[:, :, -1].contiguous(), gate.flatten(1).unsqueeze(1)


def gated_norm(read: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of `read` times `weight` [d] and silu of `gate`; both are [tokens, heads, d]."""
    found: Tensor = _GatedNorm.apply(read, gate, weight, eps)
    return found


class _GatedNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, read: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(read, gate, weight)
        found: Tensor = compiled(_gated_norm)(*any_length(read, gate), weight, eps)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        read, gate, weight = ctx.saved_tensors
        return *compiled(_gated_norm_backward)(*any_length(grad, read, gate), weight, ctx.eps), None


class _ResidualNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, factor: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.eps = eps
        ctx.save_for_backward(hidden, factor)
        return hidden.view_as(hidden), _rms_norm(hidden, factor, eps)

    @staticmethod
    def backward(ctx: Any, residual: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_triton().residual_norm_backward(residual, grad, *ctx.saved_tensors, ctx.eps), None


class _Swiglu(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _triton().swiglu(gate_up) if gate_up.is_cuda else _swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        if gate_up.is_cuda:
            return _triton().swiglu_backward(gate_up, grad)
        (slope,) = vjp(_swiglu, gate_up)[1](grad)
        return slope


class _Weighted(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        found: Tensor = compiled(_scale)(*any_length(rows, weights))
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        of_rows, of_weights = compiled(_scale_backward)(*any_length(grad, rows, weights))
        return of_rows, of_weights


class _RotatedHeads(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, eps: float, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.eps = eps
        ctx.save_for_backward(*inputs)
        return _triton().rotated_heads(eps, *inputs) if inputs[0].is_cuda else _rotated_heads(eps, *inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # each look at it computes again what was not kept
        parts, cosines, sines, *weights = saved
        if parts.is_cuda:
            found = _triton().rotated_heads_backward(grads, ctx.eps, *saved)
        else:
            found = vjp(
                lambda parts, *weights: _rotated_heads(ctx.eps, parts, cosines, sines, *weights),
                parts,
                *weights,
            )[1](grads)
        slope, *of_weights = found
        return None, slope, None, None, *of_weights


def _triton() -> ModuleType:
    from hpc_swe.models.policies._megatron.kernels import triton_kernels  # Triton needs CUDA

    return triton_kernels


def _scale(rows: Tensor, weights: Tensor) -> Tensor:
    return (rows * weights[:, None]).to(rows.dtype)


def _scale_backward(grad: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    of_weights = (grad.to(weights.dtype) * rows).sum(1)
    return (grad * weights[:, None]).to(rows.dtype), of_weights


def _rms_norm(hidden: Tensor, factor: Tensor, eps: float) -> Tensor:
    return F.rms_norm(hidden.to(factor.dtype), factor.shape, factor, eps).to(hidden.dtype)


def _gated_norm(read: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = F.rms_norm(read.float(), weight.shape, eps=eps).to(read.dtype)
    return (weight * normed * F.silu(gate.float())).to(read.dtype)


def _gated_norm_backward(
    grad: Tensor, read: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    states, opened, above = read.float(), gate.float(), grad.float()
    scale = torch.rsqrt(states.square().mean(-1, keepdim=True) + eps)
    normed, share = states * scale, opened.sigmoid()
    of_product = above * opened * share
    of_gate = above * weight * normed * share * (1 + opened * (1 - share))
    of_normed = of_product * weight
    of_read = scale * (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True))
    of_weight = (of_product * normed).sum((0, 1))
    return of_read.to(read.dtype), of_gate.to(gate.dtype), of_weight.to(weight.dtype)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _rotated_heads(
    eps: float, parts: Tensor, cosines: Tensor, sines: Tensor, *weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = parts[:, :, :-2].flatten(1, 2), parts[:, :, -2], parts[:, :, -1]
    if weights:
        query, key = (
            F.rms_norm(states, weight.shape, weight, eps)
            for states, weight in zip((query, key), weights, strict=True)
        )
    return _rotate(query, cosines, sines), _rotate(key, cosines, sines), value.contiguous()


def _rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply rotary position embedding to [tokens, heads, d], with halves paired as in Hugging Face's models.

    Source: Su et al. 2021, arXiv 2104.09864.
    """
    left, right = states.chunk(2, dim=-1)
    return states * cosines + torch.cat((-right, left), dim=-1) * sines


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled where there is CUDA."""
    return torch.compile(function) if torch.cuda.is_available() else function


def any_length(*values: Any) -> tuple[Any, ...]:
    """Mark the number of rows as one that varies, so that another one needs no compilation."""
    for each in values:
        if isinstance(each, Tensor) and each.is_cuda and len(each) == len(values[0]):
            torch._dynamo.maybe_mark_dynamic(each, 0)
    return values
