"""Define what a taskset is: a source of tasks."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from hpc_swe.base.records import Message, Split, Task


class Taskset(ABC):
    """Hold two disjoint splits, each with tasks in an order that never changes."""

    checked: str | None = None
    """File of task checks, of which only usable tasks are taken; empty takes all tasks. None if this taskset
    cannot leave any out."""

    @abstractmethod
    def load(self, split: Split) -> Iterable[Task]:
        """Return the tasks of one split; there may be no end of them."""

    def demonstrations(self, seed: int) -> Iterable[list[Message]] | None:
        """Return endless conversations on training tasks for a warm start; None if there are none.

        They show how an agent might act. The agent's system prompt replaces theirs.
        """
        return None

    def references(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Return a right patch for each task of which one is known: task id -> patch.

        They test a grader, and no agent ever sees them.
        """
        return {}

    def changed_tests(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Return other versions of the hidden tests, as `hidden_tests.with_versions` takes them, by task id.

        Tasks without any are left out. No agent ever sees them.
        """
        return {}

    @property
    def weights(self) -> dict[str, float]:
        """Return part -> weight: groups are divided among parts in proportion to these; empty is one part.

        The `taskset` of each task names its part.
        """
        return {}

    def by_part(self, tasks: Iterable[Task]) -> Iterable[tuple["Taskset", list[Task]]]:
        """Return each part, which may have its own file of task checks, with its own ones of the tasks."""
        return [(self, list(tasks))]

    def unchecked(self) -> "Taskset":
        """Return the taskset of all tasks, checked or not."""
        return self


class ReadsRows(Protocol):
    """A taskset that reads rows in the columns of several published sets."""

    def row_of(self, where: str, columns: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the name of a row's set, and the row in the taskset's own columns.

        Raise ConfigError, which begins with the row's place, if no task can be made of it.
        """
