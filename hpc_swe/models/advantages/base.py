"""Define what an advantage estimator is: a function from the rewards of a group to its advantages."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Advantage(Protocol):
    """Estimate how much better than its group each episode was."""

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        """Return one advantage per reward, in the same order; all are 0 when the group has no signal."""


@runtime_checkable
class Bounded(Protocol):
    """Mark an estimator that is not defined for every reward; a start refuses settings that give others."""

    @property
    def lowest_reward(self) -> float:
        """Return the lowest reward for which the estimator is defined."""


@runtime_checkable
class Arranging(Protocol):
    """Mark an estimator that gives an episode the advantage of another one, and so its penalty too."""

    def arranged(self, values: Sequence[float]) -> list[float]:
        """Return the values of the episodes of a group, as the advantages are arranged."""


@runtime_checkable
class PerGroup(Protocol):
    """Mark an estimator that differs by group; the coordinator asks it for the one of each group."""

    def for_group(self, group_id: int) -> Advantage:
        """Return the estimator of one group."""
