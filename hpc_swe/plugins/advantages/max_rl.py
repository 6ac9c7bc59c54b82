"""Maximum likelihood RL (MaxRL): the rarer a task's success, the more each success counts."""

from collections.abc import Sequence
from statistics import fmean

from hpc_swe.errors import ConfigError
from hpc_swe.plugins import Plugin


class MaxRl(Plugin, frozen=True, kw_only=True):
    """(reward - mean) / mean: climbs log P(success). Source: Tajwar et al. 2026, arXiv 2602.02710.

    The mean of the group stands for the success rate, so rewards must not be negative.
    """

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        if min(rewards) < 0:
            raise ConfigError(
                f"[advantage] max_rl wants rewards of 0 or more, the grader gave {min(rewards)}; "
                "set the grader's reward of a failure to 0, or use grpo"
            )
        mean = fmean(rewards)
        return [(reward - mean) / mean if mean > 0 else 0.0 for reward in rewards]
