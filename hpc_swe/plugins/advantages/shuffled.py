"""The control: another estimator's advantages, dealt out at random within the group.

What a run still learns with it, it did not learn from the reward.
"""

import random
import zlib
from collections.abc import Sequence

import msgspec

from hpc_swe import plugins
from hpc_swe.plugins import Plugin


class Shuffled(Plugin, frozen=True, kw_only=True):
    """The coordinator asks `for_group` first: one fixed permutation would be a relabelling, no control."""

    seed: int = 0
    """Of the shuffling."""
    of: dict[str, str | bool | int | float] = msgspec.field(default_factory=lambda: {"type": "grpo"})
    """Table of the estimator that is shuffled."""

    def for_group(self, group_id: int) -> "Shuffled":
        """The control with the permutation of one group."""
        return msgspec.structs.replace(self, seed=zlib.crc32(f"{self.seed}/{group_id}".encode()))

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        advantages: list[float] = plugins.load("advantages", self.of)(rewards)
        random.Random(self.seed).shuffle(advantages)
        return advantages
