"""Implement REINFORCE leave-one-out (RLOO): the baseline of an episode is the mean reward of its siblings."""

from collections.abc import Sequence

from hpc_swe.base.loader import Plugin
from hpc_swe.models.advantages.base import Advantage


class Rloo(Plugin, Advantage, frozen=True, kw_only=True):
    """Use an unbiased baseline: no episode is in its own. Source: Ahmadian et al. 2024, arXiv 2402.14740."""

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        total, others = sum(rewards), len(rewards) - 1
        return [reward - (total - reward) / others for reward in rewards]
