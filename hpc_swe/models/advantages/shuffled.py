"""Provide a control experiment: shuffle the advantages of another estimator within each group.

A run that still improves with it does not improve because of the reward.
"""

import random
import zlib
from collections.abc import Sequence

import msgspec

from hpc_swe.base import loader
from hpc_swe.base.loader import Plugin
from hpc_swe.models.advantages.base import Advantage


class Shuffled(Plugin, Advantage, frozen=True, kw_only=True):
    """Shuffle each group with its own permutation; one for all groups would only relabel the episodes."""

    seed: int = 0
    """Seed of the permutations."""
    of: dict[str, str | bool | int | float] = msgspec.field(default_factory=lambda: {"type": "grpo"})
    """Table of the estimator whose advantages are shuffled."""

    @property
    def lowest_reward(self) -> float:
        """Return that of the other estimator."""
        return self._other().lowest_reward

    def for_group(self, group_id: int) -> "Shuffled":
        """Return the estimator with the permutation of one group."""
        return msgspec.structs.replace(self, seed=zlib.crc32(f"{self.seed}/{group_id}".encode()))

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        return self.arranged(self._other()(rewards))

    def arranged(self, values: Sequence[float]) -> list[float]:
        """Return the values in the order of the permutation."""
        dealt = list(values)
        random.Random(self.seed).shuffle(dealt)
        return dealt

    def _other(self) -> Advantage:
        other: Advantage = loader.load("advantages", self.of)
        return other
