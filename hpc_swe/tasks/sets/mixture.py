"""Mix several tasksets in one run: groups are divided among them in proportion to their weights."""

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.loader import Plugin, load
from hpc_swe.base.records import Split, Task
from hpc_swe.tasks.sets.base import Taskset


class Mixture(Plugin, Taskset, frozen=True, kw_only=True):
    """Take the tasks of several parts in turn; a task's `taskset` becomes the name of its part."""

    parts: dict[str, dict[str, Any]]
    """Name -> the table of a taskset: its type and keys, and a `weight`, which is 1.0 if it is not given."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a part that is no taskset, and ValueError for a weight that is not > 0.

        A mixture cannot be a part, since a task names only one part.
        """
        if not self.parts:
            raise ValueError("parts is empty; add for example [taskset.parts.easy]")
        for name, weight in self.weights.items():
            if type(weight) not in (int, float) or not 0 < weight < float("inf"):
                raise ValueError(f"parts.{name}.weight = {weight!r}: it must be a positive number")
        for name, taskset in self._tasksets().items():
            if isinstance(taskset, Mixture):
                raise ValueError(f"parts.{name} is a mixture too: list its parts here, with their weights")

    @property
    def weights(self) -> dict[str, float]:
        """Return part -> weight."""
        return {name: table.get("weight", 1.0) for name, table in self.parts.items()}

    def load(self, split: Split) -> Iterator[Task]:
        """Yield a task of each part in turn, until all parts have ended.

        Raise ConfigError if two parts have a task of the same id.
        """
        running = {name: iter(taskset.load(split)) for name, taskset in self._tasksets().items()}
        part_of: dict[str, str] = {}
        while running:
            for name, tasks in list(running.items()):
                task = next(tasks, None)
                if task is None:
                    del running[name]
                    continue
                first = part_of.setdefault(task.task_id, name)
                if first != name:
                    raise ConfigError(f"[taskset.parts] {first} and {name} both have a task {task.task_id!r}")
                yield replace(task, taskset=name)

    def references(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Return the right patches of the parts that know some."""
        return {
            task_id: patch
            for taskset, own in self.by_part(tasks)
            for task_id, patch in taskset.references(own).items()
        }

    def changed_tests(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Return the versions of hidden tests of the parts that know some."""
        return {
            task_id: versions
            for taskset, own in self.by_part(tasks)
            for task_id, versions in taskset.changed_tests(own).items()
        }

    def unchecked(self) -> "Mixture":
        """Return the mixture of all tasks, checked or not."""
        parts = self._tasksets().items()
        checked = [name for name, taskset in parts if taskset.checked is not None]
        return replace(
            self, parts=self.parts | {name: self.parts[name] | {"checked": ""} for name in checked}
        )

    def by_part(self, tasks: Iterable[Task]) -> Iterator[tuple[Taskset, list[Task]]]:
        """Yield each part with its own ones of the tasks."""
        found = list(tasks)
        for name, taskset in self._tasksets().items():
            yield taskset, [task for task in found if task.taskset == name]

    def _tasksets(self) -> dict[str, Taskset]:
        tables = {
            name: {key: value for key, value in table.items() if key != "weight"}
            for name, table in self.parts.items()
        }
        return {name: load("tasksets", table) for name, table in tables.items()}
