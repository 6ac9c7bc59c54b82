"""Compute output layer and log-probability together, so that the logits of a long batch never exist at once.

For 2,048 tokens and a vocabulary of 151,936, a plain log_softmax needs 3.4 GiB beyond its input and this
function 0.3 GiB. Backward computes the logits a second time.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of `targets`, and the entropies of their distributions.

    The vocabulary is split among the ranks of `group`: `weight` [vocabulary / ranks, width] has the rows of
    this rank. On all ranks `hidden` [n, width] and the results, two float32 [n], are equal, and `targets`,
    int64 [n], are indices into the whole vocabulary. The logits of `chunk` tokens are computed at a time.
    The gradient to `hidden` is this rank's part of a sum.
    """
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, targets, group, chunk)
    return logprobs, entropy


class _LinearLogprobs(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup, chunk: int
    ) -> tuple[Tensor, Tensor]:
        n, vocab = hidden.shape[0], weight.shape[0]
        local = targets - group.rank() * vocab
        own = (local >= 0) & (local < vocab)
        local = local.clamp(0, vocab - 1)
        peak = torch.empty(n, device=hidden.device)
        total, chosen, moment = stats = torch.empty(3, n, device=hidden.device)
        for part in _parts(n, chunk):
            logits = (hidden[part] @ weight.t()).float()
            peak[part] = logits.amax(-1)
            chosen[part] = logits.gather(1, local[part, None])[:, 0] * own[part]
            logits.sub_(peak[part, None])  # in place: the product above is a new tensor
            powers = logits.exp()
            total[part] = powers.sum(-1)
            moment[part] = powers.mul_(logits).sum(-1)
        if group.size() > 1 and n:
            peak = _combine(peak, stats, group)
        log_total = total.log()
        logprobs = chosen - log_total - peak
        entropy = log_total - moment / total
        ctx.save_for_backward(hidden, weight, local, own, log_total + peak, entropy)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)  # without an entropy bonus, its gradient costs nothing
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local, own, log_total, entropy = ctx.saved_tensors
        grad = torch.zeros_like(entropy) if grad is None else grad
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for part in _parts(hidden.shape[0], ctx.chunk):
            logs = (hidden[part] @ weight.t()).float().sub_(log_total[part, None])
            rows = grad[part, None]
            if entropy_grad is None:  # d logp / d logits = onehot - p
                slope = logs.exp_().mul_(-rows)
            else:  # and d entropy / d logits = -p (log p + entropy)
                of_entropy = (logs + entropy[part, None]).mul_(entropy_grad[part, None])
                slope = logs.exp_().mul_(of_entropy.add_(rows)).neg_()
            slope.scatter_add_(1, local[part, None], (own[part, None] * rows).to(slope.dtype))
            slope = slope.to(hidden.dtype)
            hidden_grad[part] = slope @ weight
            weight_grad += slope.t() @ hidden[part]
        return hidden_grad, weight_grad.to(weight.dtype), None, None, None


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
