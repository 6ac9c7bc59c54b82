"""Compute output layer and log-probability together, so that the logits of a long batch never exist at once.

For 2,048 tokens and a vocabulary of 151,936, a plain log_softmax needs 3.4 GiB beyond its input and this
function 0.3 GiB. Backward computes the logits a second time.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_swe.models.policies._megatron.kernels.compat import add_product
from hpc_swe.models.policies._megatron.kernels.kernels import any_length, compiled


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
    chunk: int,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of `targets`, and the entropies of their distributions.

    The vocabulary is split among the ranks of `group`: `weight` [vocabulary / ranks, width] has the rows of
    this rank. On all ranks `hidden` [n, width] and the results, two float32 [n], are equal, and `targets`,
    int64 [n], are indices into the whole vocabulary. The logits of `chunk` tokens are computed at a time.
    The gradient to `hidden` is this rank's part of a sum. The weight's is added to `sink`, float32 on CUDA,
    if there is one.
    """
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, targets, group, chunk, sink)
    return logprobs, entropy


class _LinearLogprobs(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        group, ctx.chunk, ctx.sink = rest
        n, vocab = hidden.shape[0], weight.shape[0]
        local = targets - group.rank() * vocab
        own = (local >= 0) & (local < vocab)
        local = local.clamp(0, vocab - 1)
        peak = torch.empty(n, device=hidden.device)
        total, chosen, moment = stats = torch.empty(3, n, device=hidden.device)
        for part in _parts(n, ctx.chunk):
            logits = _logits(hidden[part], weight)
            chosen[part] = logits.gather(1, local[part, None])[:, 0] * own[part]
            peak[part], total[part], moment[part] = compiled(_sums)(*any_length(logits))
            del logits  # before the next chunk's
        if group.size() > 1 and n:
            peak = _combine(peak, stats, group)
        log_total = total.log()
        logprobs = chosen - log_total - peak
        entropy = log_total - moment / total
        ctx.save_for_backward(hidden, weight, local, own, log_total + peak, entropy)
        ctx.set_materialize_grads(False)  # without an entropy bonus, its gradient costs nothing
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local, own, log_total, entropy = ctx.saved_tensors
        grad = torch.zeros_like(entropy) if grad is None else grad
        hidden_grad = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]
        weight_grad = ctx.sink
        if is_trained and weight_grad is None:
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for part in _parts(hidden.shape[0], ctx.chunk):
            rows = any_length(log_total[part], grad[part], local[part], own[part])
            of_entropy = () if entropy_grad is None else any_length(entropy[part], entropy_grad[part])
            logits = any_length(_logits(hidden[part], weight))
            slope = compiled(_slope)(*logits, rows, of_entropy, hidden.dtype)
            del logits  # before the next chunk's
            hidden_grad[part] = slope @ weight
            if not is_trained:
                continue
            if ctx.sink is None:
                weight_grad += slope.t() @ hidden[part]
            else:
                add_product(hidden[part], slope, weight_grad)
        returned = weight_grad.to(weight.dtype) if is_trained and ctx.sink is None else None
        return hidden_grad, returned, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return float32 logits; CUDA does not round the sums of products to bfloat16 on the way."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return (hidden @ weight.t()).float()


def _sums(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the peak of each row x, and the sums of exp(x - peak) and (x - peak) exp(x - peak)."""
    peak = logits.amax(-1)
    below = logits - peak[:, None]
    powers = below.exp()
    return peak, powers.sum(-1), (powers * below).sum(-1)


def _slope(
    logits: Tensor, rows: Sequence[Tensor], of_entropy: Sequence[Tensor], dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the logits.

    d logp / d logits = onehot - p, and d entropy / d logits = -p (log p + entropy).
    """
    log_total, grad, local, own = (each[:, None] for each in rows)
    logs = logits - log_total
    slope = logs.exp()
    if of_entropy:
        entropy, entropy_grad = (each[:, None] for each in of_entropy)
        slope = (slope * ((logs + entropy) * entropy_grad + grad)).neg()
    else:
        slope = slope * -grad
    chosen = own & (torch.arange(logits.shape[1], device=logits.device) == local)
    return (slope + torch.where(chosen, grad, 0.0)).to(dtype)


def _combine(peak: Tensor, stats: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce (sum exp(x - peak), chosen logit, sum (x - peak) exp(x - peak)) over the whole vocabulary.

    Changes `stats` in place and returns the peak of the whole vocabulary, which it now refers to.
    """
    highest = peak.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shift = peak - highest
    stats[2] = (stats[2] + stats[0] * shift) * shift.exp()
    stats[0] *= shift.exp()
    dist.all_reduce(stats, group=group)
    return highest


def _parts(n: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, n)) for start in range(0, n, chunk)]
