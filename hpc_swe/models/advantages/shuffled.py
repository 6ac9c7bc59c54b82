"""Provide a control experiment: shuffle the advantages of another estimator within each group.

A run that still improves with it does not improve because of the reward.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hpc_swe.base import loader
from hpc_swe.base.loader import Plugin
from hpc_swe.models.advantages.base import Advantage


class Shuffled(Plugin, Advantage, frozen=True, kw_only=True):
    """Shuffle each group with its own permutation; one for all groups would only relabel the episodes."""

    of: dict[str, str | bool | int | float] = msgspec.field(default_factory=lambda: {"type": "grpo"})
    """Table of the estimator whose advantages are shuffled."""

    @property
    def lowest_reward(self) -> float:
        """Return that of the other estimator."""
        return self._other().lowest_reward

    def for_group(self, group_id: int) -> Advantage:
        """Return the estimator with the permutation of one group."""
        return _ShuffledGroup(self._other(), group_id)

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        return self.for_group(0)(rewards)

    def _other(self) -> Advantage:
        other: Advantage = loader.load("advantages", self.of)
        return other


@dataclass(frozen=True)
class _ShuffledGroup(Advantage):
    other: Advantage
    group_id: int

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        return self.arranged(self.other(rewards))

    def arranged(self, values: Sequence[float]) -> list[float]:
        """Return the values in the order of the permutation."""
        dealt = list(values)
        random.Random(self.group_id).shuffle(dealt)
        return dealt
