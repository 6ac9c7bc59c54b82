"""The seam: how a group's rewards become advantages."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Advantage(Protocol):
    """The plugin."""

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per episode of a group, in the group's order; all 0 when there is no signal."""
