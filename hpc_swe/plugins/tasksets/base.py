"""The seam: a source of tasks."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from hpc_swe.records import Message, Split, Task


@runtime_checkable
class Taskset(Protocol):
    """Tasks of two disjoint splits, in an order that never changes."""

    def load(self, split: Split) -> Iterable[Task]:
        """Tasks of one split; may be endless."""


@runtime_checkable
class Demonstrated(Protocol):
    """A taskset that can also show how an agent might act, for a warm start."""

    def demonstrations(self, seed: int) -> Iterable[list[Message]]:
        """Endless conversations on training tasks; a system prompt is replaced by the agent's."""


@runtime_checkable
class Referenced(Protocol):
    """A taskset that also knows how its tasks are solved, to try a grader by; no agent ever learns it."""

    def references(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Task id -> a submission that is right."""


@runtime_checkable
class Changed(Protocol):
    """A taskset that also knows other versions of its hidden tests; no agent ever learns them."""

    def changed_tests(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Task id -> what `graders.base.carrying` takes; a task that has none is missing."""
