"""Generate endless bug-fix tasks: a small function with one wrong operator, and tests that fail by it.

Task n of a split depends on the seed, the split and n alone. Training and evaluation share the operators and
the words that name them. The function bodies that these occur in, the names of functions and arguments, and
the constants differ.
"""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Message, Split, Task, TestPlan
from hpc_swe.tasks import patch
from hpc_swe.tasks.sets._bugs_demonstrator import conversation
from hpc_swe.tasks.sets._bugs_grammar import OPERATORS, Function, draw
from hpc_swe.tasks.sets.base import Taskset

MODULE = "mod.py"
VISIBLE = "test_mod.py"
HIDDEN = "test_hidden.py"
WORKDIR = "/work"  # folder of the task's files in the sandbox
SYSTEM = "Fix the bug."
PROMPT = f"{MODULE} fails {VISIBLE}."


@dataclass(frozen=True)
class Case:
    """A case is one call and the value that it must return."""

    arguments: tuple[int | list[int], ...]
    expected: object


@dataclass(frozen=True)
class Bug:
    """A bug is a function, the wrong operator in its hole, and the cases that show the operator is wrong."""

    function: Function
    wrong: str
    visible: list[Case]
    hidden: list[Case]

    @property
    def source(self) -> str:
        """Return the text of the module when the agent begins."""
        return self.function.source(self.wrong)

    @property
    def visible_tests(self) -> str:
        """Return the text of the file of tests when the agent begins."""
        return _tests(self.function, self.visible)


class Bugs(Plugin, Taskset, frozen=True, kw_only=True):
    """A taskset that is generated: mutated functions, without end and without a data set."""

    seed: ClassVar[int] = 0  # of the functions and their bugs
    image: str = "python-pytest"
    """Image of the sandbox."""
    timeout_s: float = 30.0
    """Seconds of processor time that each process of a task's tests may use; all tests together may take
    twice as much time, or ten times as much where they wait for a processor."""

    def load(self, split: Split) -> Iterator[Task]:
        """Yield endless tasks."""
        for number in itertools.count():
            yield self._task(split, number)

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        """Yield endless conversations on functions of the training split."""
        for number in itertools.count():
            rng = random.Random(f"demonstration {seed} {number}")
            bug = make(rng, "train")
            yield [*opening(), *conversation(bug.function, bug.wrong, MODULE, rng)]

    def references(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Return patches that put the right operator back: task id -> patch."""
        found = {}
        for task in tasks:
            split: Split = "train" if task.task_id.startswith("bugs-train-") else "eval"
            right = self._bug(split, int(task.task_id.rpartition("-")[2])).function
            found[task.task_id] = patch.difference(MODULE, task.files[MODULE], right.source(right.right))
        return found

    def _bug(self, split: Split, number: int) -> Bug:
        return make(random.Random(f"{self.seed} {split} {number}"), split)

    def _task(self, split: Split, number: int) -> Task:
        bug = self._bug(split, number)
        files = {VISIBLE: bug.visible_tests, HIDDEN: _tests(bug.function, bug.hidden)}
        names = [f"{file}::test_{i}" for file in files for i in range(len(bug.visible))]
        broken = [not holds(bug.function, bug.wrong, case) for case in bug.visible + bug.hidden]
        return Task(
            task_id=f"bugs-{split}-{number}",
            taskset="bugs",
            prompt=PROMPT,
            image=self.image,
            workdir=WORKDIR,
            files={MODULE: bug.source, VISIBLE: files[VISIBLE]},
            tests=TestPlan(
                command=f"python -m pytest -q {VISIBLE} {HIDDEN}",
                files=files,
                fail_to_pass=list(itertools.compress(names, broken)),
                pass_to_pass=list(itertools.compress(names, (not b for b in broken))),
                timeout_s=self.timeout_s,
            ),
        )


def opening() -> list[Message]:
    """Return the messages that a conversation opens with."""
    return [Message(role="system", content=SYSTEM), Message(role="user", content=PROMPT)]


def make(rng: random.Random, split: Split) -> Bug:
    """Draw a bug whose every wrong repair fails both the visible and the hidden cases."""
    while True:
        function = draw(rng, split)
        wrong = rng.choice([o for o in OPERATORS if o not in function.plausible])
        cases = [_case(rng, function, relation) for relation in (-1, 0, 1, -1, 0, 1)]
        rng.shuffle(cases)
        bug = Bug(function, wrong, visible=cases[:3], hidden=cases[3:])
        others = [o for o in OPERATORS if o != function.right]
        if all(
            not all(holds(function, other, case) for case in half)
            for other in others
            for half in (bug.visible, bug.hidden)
        ):
            return bug


def holds(function: Function, operator: str, case: Case) -> bool:
    """Return whether the function with this operator returns the value that the case expects."""
    return call(function, operator, case.arguments) == case.expected


def call(function: Function, operator: str, arguments: tuple[int | list[int], ...]) -> object:
    """Run the function in this process; its text was generated here."""
    names: dict[str, object] = {}
    exec(function.source(operator), names)  # noqa: S102
    target = names[function.name]
    assert callable(target)
    return target(*arguments)


def _case(rng: random.Random, function: Function, relation: int) -> Case:
    second = function.constant if function.constant is not None else rng.randint(2, 99)
    number = second + relation * rng.randint(1, 40)
    spread = [second - rng.randint(1, 40), second, second + rng.randint(1, 40)]
    first = rng.sample([number, *spread], 4) if function.loops else number
    arguments = (first,) if function.constant is not None else (first, second)
    return Case(arguments, call(function, function.right, arguments))


def _tests(function: Function, cases: list[Case]) -> str:
    lines = [f"from {MODULE.removesuffix('.py')} import {function.name}"]
    for number, case in enumerate(cases):
        called = f"{function.name}({', '.join(map(repr, case.arguments))})"
        lines += ["", "", f"def test_{number}():", f"    assert {called} == {case.expected!r}"]
    return "\n".join(lines) + "\n"
