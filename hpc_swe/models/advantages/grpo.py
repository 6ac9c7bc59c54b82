"""Implement Group Relative Policy Optimization (GRPO): compare each episode with its own group."""

from collections.abc import Sequence
from statistics import fmean, pstdev

from hpc_swe.base.loader import Plugin
from hpc_swe.models.advantages.base import Advantage


class Grpo(Plugin, Advantage, frozen=True, kw_only=True):
    """Subtract the group's mean reward and need no critic. Source: Shao et al. 2024, arXiv 2402.03300."""

    scale_by_std: bool = False
    """Divide by the group's standard deviation, as the paper does; Dr. GRPO (arXiv 2503.20783) does not."""

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        mean = fmean(rewards)
        scale = pstdev(rewards) + 1e-6 if self.scale_by_std else 1.0
        return [(reward - mean) / scale for reward in rewards]
