"""Define what an advantage estimator is: a function from the rewards of a group to its advantages."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence


class Advantage(ABC):
    """Estimate how much better than its group each episode was."""

    @abstractmethod
    def __call__(self, rewards: Sequence[float]) -> list[float]:
        """Return one advantage per reward, in the same order; all are 0 when the group has no signal."""

    @property
    def lowest_reward(self) -> float:
        """Return the lowest reward for which the estimator is defined; a start refuses lower ones."""
        return -math.inf

    def for_group(self, group_id: int) -> "Advantage":
        """Return the estimator of one group; an estimator may differ by group."""
        return self

    def arranged(self, values: Sequence[float]) -> list[float]:
        """Return the penalties of a group's episodes in the order in which it hands out their advantages."""
        return list(values)
