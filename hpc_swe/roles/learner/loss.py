"""Define what a step minimizes: the sum over trained tokens of weight times term, divided by nothing.

The term of a token is that of its objective, of which each has a file in objectives/, or 0 where masks.py
leaves the token out, and

    + sampler_coefficient d^2,  d = log pi - log mu

This pulls pi back to the weights mu that sampled the token, with a slope of 2 d however far pi is, where a
clip only ceases to push. It is the regularizer of Kimi k1.5 (arXiv 2501.12599, section 2.3.2, whose squares
are of whole answers), taken token by token as prime-rl does beside its masks. Tokens that an objective clips,
caps or masks have it, too.

    + kl_coefficient r_mu (e^d - 1 - d),  d = log ref - log pi,  r_mu = pi / mu

where ref are the initial weights. This is the k3 estimate of KL(pi, ref), times the importance ratio because
mu drew the tokens; the gradient of its expectation is that of the divergence (DeepSeek-V3.2 report, section
3.1). The slope of one token is -r_mu d, in which r_mu is bounded to min(r_mu, dual_clip): it is in the
thousands where a router sends a token to other experts here than in the engine.

    - entropy_coefficient H

is the entropy bonus (Mnih et al. 2016, arXiv 1602.01783, section 4): H is the entropy of pi at the token. Its
gradient is that of the entropy at the prefixes that were sampled, whose own probability counts as constant.
"""

from collections.abc import Sequence
from pkgutil import resolve_name

import torch
from torch import Tensor

from hpc_swe.models.policies.base import LossConfig, TrainedTokens
from hpc_swe.roles.learner import token_statistics
from hpc_swe.roles.learner.masks import masks
from hpc_swe.roles.learner.objectives.base import LARGEST, TokenObjective, before_batch, ratio_of


class PolicyObjective:
    """Compute the loss of a configuration, and the metrics that show whether it can be trusted."""

    def __init__(self, config: LossConfig) -> None:
        self._config = config
        self._objective = load(config.objective)
        self.needs_reference = config.kl_coefficient > 0
        self.needs_proximal = self._objective.needs_proximal
        self._means: tuple[str, ...] = ()

    def __call__(self, tokens: TrainedTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss; the sums of `token_statistics.totals`; the largest |log pi_prox - log mu|."""
        term, means = self._objective(tokens, self._config)
        for name, mask in masks(tokens, self._config).items():
            term, means[name] = term.masked_fill(mask, 0.0), mask
        if self._objective.is_sampled and self._config.sampler_coefficient:
            square = (tokens.logprobs - tokens.sampler).square()
            term = term + self._config.sampler_coefficient * square
            means["policy/sampler_square"] = square
        if self.needs_reference:
            distance = divergence(tokens, self._config)
            term = term + self._config.kl_coefficient * distance
            means["policy/kl"] = distance
        if self._config.entropy_coefficient:
            term = term - self._config.entropy_coefficient * tokens.entropy
        self._means = tuple(means)
        with torch.no_grad():
            sums = token_statistics.totals(tokens, means)
            gap = (before_batch(tokens) - tokens.sampler).abs()
            largest = torch.cat((gap, gap.new_zeros(1))).amax()[None]
        return (tokens.weights * term).sum(), sums, largest

    def metrics(self, sums: Sequence[float], maxima: Sequence[float]) -> dict[str, float]:
        """Return means over the trained tokens of the step, without those that the objective does not use."""
        is_sampled = self._objective.is_sampled
        found = token_statistics.means(sums, self._means, is_sampled=is_sampled)
        return found | ({"gap/max": maxima[0]} if is_sampled else {})


def load(name: str) -> TokenObjective:
    """Return the objective of a name; its file in objectives/ is named by it."""
    kind = name.title().replace("_", "")
    objective: TokenObjective = resolve_name(f"{__package__}.objectives.{name}:{kind}")()
    return objective


def divergence(tokens: TrainedTokens, config: LossConfig) -> Tensor:
    """Return k3 estimates [n] of the divergence from the reference, with their slope bounded as above."""
    if tokens.reference is None:
        raise ValueError("the KL needs log-probabilities of the reference, but the policy computed none")
    now = tokens.logprobs.detach()
    difference = (tokens.reference - now).clamp(-LARGEST, LARGEST)
    ratio = ratio_of(now, tokens.sampler)
    slope = -ratio.clamp(max=config.dual_clip) * difference
    return ratio * (difference.exp() - 1 - difference) + slope * (tokens.logprobs - now)
