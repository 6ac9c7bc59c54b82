"""Choose the task of every training group, by weights of the parts of a mixture and by earlier results.

A run makes visits, numbered 0, 1, 2 .. Which task visit v goes to follows from the seed and v alone: the part
that is furthest behind its weight is next, and each pass over the tasks of a part has its own order. A group
takes the next visit that is not passed over.

A task is settled when each of its last `settled_after` groups was resolved by all of its episodes or by none.
After each group, a settled task is passed over at its next `rest` visits. Its groups are then sampled at
1 / (1 + rest) of the rate of the others, so the gradient is that of an objective that weights settled tasks
by this share.

Tasks are planned in order of groups from the history of the last published batch. The plan of groups that
were planned before that batch is published with the history, so a coordinator that starts plans the same.
How far ahead groups are planned depends on when episodes end; with `rest` above 0, the tasks of later groups
depend on that too.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import replace

from hpc_swe.base.records import RolloutRequest
from hpc_swe.base.store.task_history import RunHistory, TaskHistory
from hpc_swe.config.settings import CurriculumConfig
from hpc_swe.roles.coordinator.batching.groups import Group
from hpc_swe.roles.coordinator.dispatch import RequestPlan


@dataclass(frozen=True)
class WeightedTasks:
    """Name training tasks that are visited with one weight."""

    name: str
    tasks: tuple[str, ...]
    weight: float = 1.0


def visits(seed: int, sources: Sequence[WeightedTasks]) -> Iterator[str]:
    """Yield the task of each visit, without end."""
    taken = [0] * len(sources)
    while True:
        place = min(range(len(sources)), key=lambda i: ((taken[i] + 1) / sources[i].weight, i))
        epoch, number = divmod(taken[place], len(sources[place].tasks))
        yield _order(seed, epoch, sources[place].tasks)[number]
        taken[place] += 1


class TaskPlan:
    """Choose the tasks of groups, and keep what their results say about tasks."""

    def __init__(
        self,
        requests: RequestPlan,
        sources: Sequence[WeightedTasks],
        config: CurriculumConfig,
        history: RunHistory,
    ) -> None:
        """Continue where a history ends."""
        self.source_of = {task: source.name for source in sources for task in source.tasks}
        self.passed_over = 0
        """Visits that were passed over since the last batch."""
        self._requests, self._config = requests, config
        self._first = history.next_group
        self._planned = list(history.planned)
        self._tasks = dict(history.tasks)
        self._visits = visits(requests.seed, sources)
        self._visited = 0
        while self._visited < history.visits:
            self._visit()

    @property
    def settled_share(self) -> float:
        """Return the share of settled tasks among those that have had a group."""
        return sum(map(self.is_settled, self._tasks)) / max(1, len(self._tasks))

    def requests(self, number: int) -> list[RolloutRequest]:
        """Return the requests of a group that no batch has consumed."""
        return self._requests.group(number, self._task(number))

    def is_settled(self, task: str) -> bool:
        """Return whether the last groups of a task had no signal to give."""
        return self._of(task).settled >= self._config.settled_after

    def consume(self, groups: Iterable[Group], next_group: int) -> RunHistory:
        """Enter the results of groups that a batch consumes, and return the history to publish with it.

        `next_group` is the first group after the batch.
        """
        for group in groups:
            task = self._task(group.key[1])
            solved = [scored.score.outcome == "resolved" for scored in group.results]
            if solved:
                self._tasks[task] = _updated(self._of(task), solved)
        del self._planned[: next_group - self._first]
        self._first, self.passed_over = next_group, 0
        known = RunHistory(next_group=next_group, visits=next_group, tasks=self._tasks.copy())
        if self._config.rest:
            known = replace(known, visits=self._visited, planned=self._planned[:])
        return known

    def _task(self, number: int) -> str:
        while self._first + len(self._planned) <= number:
            self._planned.append(self._next())
        return self._planned[number - self._first]

    def _next(self) -> str:
        while True:
            task = self._visit()
            known = self._of(task)
            if not self.is_settled(task) or known.passed_over >= self._config.rest:
                break
            self._tasks[task] = replace(known, passed_over=known.passed_over + 1)
            self.passed_over += 1
        if known.passed_over:
            self._tasks[task] = replace(known, passed_over=0)
        return task

    def _visit(self) -> str:
        self._visited += 1
        return next(self._visits)

    def _of(self, task: str) -> TaskHistory:
        return self._tasks.get(task, TaskHistory())


def _updated(known: TaskHistory, solved: Sequence[bool]) -> TaskHistory:
    """Enter the outcomes of a group; that of a single episode does not say whether its task is settled."""
    is_alike = len(set(solved)) == 1
    settled = known.settled if len(solved) == 1 else known.settled + 1 if is_alike else 0
    return replace(
        known,
        groups=known.groups + 1,
        episodes=known.episodes + len(solved),
        resolved=known.resolved + sum(solved),
        settled=settled,
    )


@lru_cache(maxsize=16)
def _order(seed: int, epoch: int, tasks: tuple[str, ...]) -> list[str]:
    return sorted(tasks, key=lambda task: hashlib.sha256(f"{seed}/{epoch}/{task}".encode()).digest())
