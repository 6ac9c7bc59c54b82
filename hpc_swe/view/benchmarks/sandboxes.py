"""Say what rollouts and gradings take of the processors: python -m hpc_swe.benchmarks.sandboxes.

It opens sandboxes for tasks of the demo, does in each what an agent of the demo does, and grades the repairs
in threads of this process. The table has the time on a clock, and the processor time of this process and of
all others that it has started. Other work on the machine lengthens the first much and the second less.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from operator import methodcaller
from pathlib import Path
from statistics import median
from typing import TypeVar

from hpc_swe.agents.sandboxes.base import Sandbox, Sandboxes
from hpc_swe.agents.tools.base import invoke
from hpc_swe.base import cli, tables
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.loader import load
from hpc_swe.base.records import Score, Task
from hpc_swe.cluster.processes import descendants
from hpc_swe.tasks import patch
from hpc_swe.tasks.graders.base import Grader

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Cost:
    """Hold what one piece of work takes."""

    wall_ms: float
    """Median time on a clock."""
    own_ms: float
    """Processor time of this process."""
    others_ms: float
    """Processor time of the processes that it has started."""
    per_s: float
    """Pieces of work that were done in a second."""


@dataclass(frozen=True)
class OpenTask:
    """Hold a task with its repair, and a sandbox where an agent works on it."""

    task: Task
    patch: str
    sandbox: Sandbox
    life: ExitStack

    def call(self, tool: str) -> str:
        """Call a tool as an agent of the demo does."""
        files = patch.apply(self.task, self.patch)
        (path,) = (path for path, text in files.items() if text != self.task.files.get(path))
        arguments = {
            "view": {"path": path},
            "rewrite": {"path": path, "new_code": files[path]},
            "evaluate": {},
        }
        given = (arguments | {"bash": {"command": "true"}})[tool]
        return invoke(load("tools", {"type": tool}), json.dumps(given), self.sandbox, self.task)


@dataclass(frozen=True)
class Bench:
    """Measure the work on some tasks in one type of sandbox, in a number of threads."""

    sandboxes: Sandboxes
    grader: Grader
    patches: dict[str, str]
    """Task id -> a patch that repairs the task."""
    slots: int

    def measured(self, act: Callable[[T], R], each: Sequence[T]) -> tuple[list[R], Cost]:
        """Do a piece of work with each of these; return the results and what one takes."""

        def timed(one: T) -> tuple[R, float]:
            began = time.perf_counter()
            return act(one), time.perf_counter() - began

        began, before = time.perf_counter(), used_s()
        with ThreadPoolExecutor(self.slots) as pool:
            done = list(pool.map(timed, each))
        took_s, now = time.perf_counter() - began, used_s()
        own, others = (1e3 * (end - start) / len(each) for start, end in zip(before, now, strict=True))
        wall_ms = 1e3 * median(wall_s for _, wall_s in done)
        return [result for result, _ in done], Cost(wall_ms, own, others, len(each) / took_s)

    def rollouts(self, tasks: Sequence[Task]) -> Iterator[tuple[str, Cost]]:
        """Yield what each part of an episode takes; all sandboxes are open together."""
        with ExitStack() as life:

            def opened(task: Task) -> OpenTask:
                stack = life.enter_context(ExitStack())
                sandbox = stack.enter_context(self.sandboxes.open(task))
                return OpenTask(task, self.patches[task.task_id], sandbox, stack)

            attempts, cost = self.measured(opened, tasks)
            yield "open a sandbox", cost
            for tool in ("view", "rewrite", "bash", "evaluate"):
                yield f"tool {tool}", self.measured(methodcaller("call", tool), attempts)[1]
            taken = lambda one: patch.take(one.task, one.sandbox, self.sandboxes)  # noqa: E731
            yield "take the patch", self.measured(taken, attempts)[1]
            yield "close a sandbox", self.measured(lambda one: one.life.close(), attempts)[1]

    def gradings(self, tasks: Sequence[Task]) -> Cost:
        """Return what a grading takes in threads of this process."""
        grade = lambda task: self.grader.grade(task, self.patches[task.task_id], self.sandboxes)  # noqa: E731
        scores, cost = self.measured(grade, tasks)
        _require_resolved(scores)
        return cost


def used_s() -> tuple[float, float]:
    """Return the processor time of this process, and that of all others below it, ended ones included."""
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ticks = 0
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # it ended meanwhile
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    others = ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")
    return own.ru_utime + own.ru_stime, others


def _require_resolved(scores: Sequence[Score]) -> None:
    wrong = next((score for score in scores if score.outcome != "resolved"), None)
    if wrong is not None:
        raise ConfigError(f"[sandbox] a right repair is graded as {wrong.outcome}: {wrong.detail}")


@cli.command
def main() -> None:
    """Print one table."""
    what, count = "Measure what sandboxes, tools and gradings take of the processors.", cli.number(int, 1)
    examples = ("--tasks 60 --slots 2", "--tasks 60 --slots 2 --type apptainer")
    parser = cli.parser("hpc_swe.benchmarks.sandboxes", what, *examples)
    parser.add_argument("--type", choices=("process", "apptainer"), default="process", help="kind of sandbox")
    parser.add_argument("--images", default=".cache/images", help="folder of Apptainer's images")
    parser.add_argument("--tasks", type=count, default=60, help="do so many tasks once each")
    parser.add_argument("--slots", type=count, default=2, help="do so many tasks at a time, in threads")
    _print(cli.parse(parser))


def _print(arguments: argparse.Namespace) -> None:
    more = {"images": arguments.images} if arguments.type == "apptainer" else {}
    sandboxes: Sandboxes = load("sandboxes", {"type": arguments.type, **more})
    sandboxes.check()
    taskset = load("tasksets", {"type": "bugs"})
    tasks = list(islice(taskset.load("train"), arguments.tasks))
    bench = Bench(sandboxes, load("graders", {"type": "pytest"}), taskset.references(tasks), arguments.slots)
    bench.gradings(tasks[:1])  # starts the container or the interpreter
    table = tables.table(["work"], ["wall ms", "own ms", "others ms", "together ms", "per s"])
    for name, cost in (*bench.rollouts(tasks), ("a grading", bench.gradings(tasks))):
        together_ms = cost.own_ms + cost.others_ms
        cells = (cost.wall_ms, cost.own_ms, cost.others_ms, together_ms, cost.per_s)
        table.add_row(name, *(f"{cell:.1f}" for cell in cells))
    load_now = os.getloadavg()[0]
    tables.show(tables.console, table)
    tables.say(f"{arguments.slots} at a time on {os.cpu_count()} cores; load of the machine {load_now:.1f}")


if __name__ == "__main__":
    main()
