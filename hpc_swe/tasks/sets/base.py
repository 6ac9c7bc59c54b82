"""The interfaces that a taskset may implement."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from hpc_swe.base.records import Message, Split, Task


@runtime_checkable
class Taskset(Protocol):
    """A taskset has two disjoint splits, each with tasks in an order that never changes."""

    def load(self, split: Split) -> Iterable[Task]:
        """Return the tasks of one split; there may be no end of them."""


@runtime_checkable
class Demonstrated(Protocol):
    """A taskset that can also show how an agent might act, for a warm start."""

    def demonstrations(self, seed: int) -> Iterable[list[Message]]:
        """Return endless conversations on training tasks; the agent's system prompt replaces theirs."""


@runtime_checkable
class Referenced(Protocol):
    """A taskset that also knows solutions of its tasks, to test a grader with; no agent ever sees them."""

    def references(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Return a right patch for each task of which one is known: task id -> patch."""


@runtime_checkable
class WithChangedTests(Protocol):
    """A taskset that also knows other versions of its hidden tests; no agent ever sees them."""

    def changed_tests(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Return task id -> versions as `hidden_tests.with_versions` takes them, of the tasks with some."""


class ReadsRows(Protocol):
    """A taskset that reads rows in the columns of several published sets."""

    def row_of(self, where: str, columns: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the name of a row's set, and the row in the taskset's own columns.

        Raise ConfigError, which begins with the row's place, if no task can be made of it.
        """


@runtime_checkable
class Weighted(Protocol):
    """A taskset has several parts; the `taskset` of each task names its part."""

    @property
    def weights(self) -> dict[str, float]:
        """Return part -> weight; groups are divided among parts in proportion to these."""


@runtime_checkable
class Composed(Taskset, Referenced, Protocol):
    """A taskset takes its tasks from others, each of which may have a file of task checks."""

    def by_part(self, tasks: Iterable[Task]) -> Iterable[tuple[Taskset, list[Task]]]:
        """Return each part with its own ones of the tasks, whose `taskset` is the name of their part."""

    def unchecked(self) -> "Composed":
        """Return the taskset of all tasks of all parts, checked or not."""


@runtime_checkable
class CheckedTasks(Taskset, Referenced, Protocol):
    """A taskset that can leave out the tasks that `hpc_swe.check` did not find usable."""

    checked: str
    """File of task checks, of which only usable tasks are taken; empty takes all tasks."""

    def unchecked(self) -> "CheckedTasks":
        """Return the taskset of all tasks, checked or not."""
