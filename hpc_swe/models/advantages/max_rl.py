"""Implement maximum likelihood RL (MaxRL): the rarer success is at a task, the more each success counts."""

from collections.abc import Sequence
from statistics import fmean

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.loader import Plugin
from hpc_swe.models.advantages.base import Advantage


class MaxRl(Plugin, Advantage, frozen=True, kw_only=True):
    """Compute (reward - mean) / mean, which ascends log P(success).

    The mean reward of the group estimates the success rate, so rewards must not be negative.
    Source: Tajwar et al. 2026, arXiv 2602.02710.
    """

    @property
    def lowest_reward(self) -> float:
        return 0.0

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        if min(rewards) < self.lowest_reward:
            raise ConfigError(
                f"[advantage] max_rl needs rewards of 0 or more, but got {min(rewards)}; set "
                "grader.cheated_reward and grader.unresolved_reward to 0, or use grpo"
            )
        mean = fmean(rewards)
        return [(reward - mean) / mean if mean > 0 else 0.0 for reward in rewards]
