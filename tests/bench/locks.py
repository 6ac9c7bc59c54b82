"""Tasks whose right repair is a value that exists only while the program runs, and ways to act in them.

The file `key` must hold the value of one of four names of lock.py; a test says which. Each value is computed
from a power modulo a prime, so that no file holds it. The test, and what `evaluate` shows of it, say pass or
fail only. The grader restores lock.py and the test, so nothing but the right letter in `key` passes.

Without a debugger a policy can only guess: the stale letter is wrong, and the other nine are equally likely.
"""

import itertools
import json
import random
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Message, Split, Task, TestPlan, ToolCall
from hpc_swe.tasks import patch

KEY, LOCK, TEST = "key", "lock.py", "test_lock.py"
PROMPT = f"{TEST} fails: {KEY} is stale."
LETTERS = "BDGHKMPQVWXZ"
"""Names are single letters. A quarter of all sets of four is for held-out locks only."""
NAMES = 4
PRIME = 997
VALUES = "abcdefghij"
SHARE_EVALUATED = 0.25
"""Share of demonstrations that run the test before they submit."""


@dataclass(frozen=True)
class Lock:
    """A lock has names with values, the one that the test asks for, and the stale letter of its key."""

    powers: dict[str, tuple[int, int]]
    asked: str
    stale: str

    def value(self, name: str) -> str:
        """Return the letter that a name has at run time."""
        return VALUES[pow(*self.powers[name], PRIME) % 10]

    @property
    def lock(self) -> str:
        """Return the text of the module that computes the values."""
        return "".join(
            f"{name} = chr(97 + pow({a}, {b}, {PRIME}) % 10)\n" for name, (a, b) in self.powers.items()
        )

    @property
    def test(self) -> str:
        """Return the text of the test, whose failure shows no value."""
        head = f"from lock import {', '.join(self.powers)}\n\n\n"
        read = f'    same = open("{KEY}").read() == f"{{{self.asked}}}\\n"\n'
        return f"{head}def test_key():\n{read}    assert same\n"


class Locks(Plugin, frozen=True, kw_only=True):
    """A taskset that is generated: locks without end. Held-out ones have other sets of names and values."""

    seed: int = 0
    """Seed of the locks."""
    image: str = "python-pytest"
    """Image of the sandbox."""

    def load(self, split: Split) -> Iterator[Task]:
        """Yield endless tasks."""
        for number in itertools.count():
            yield _task(split, number, make(self.seed, split, number), self.image)

    def references(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Return patches that write the right letter: task id -> patch."""
        found = {}
        for task in tasks:
            _, split, number = task.task_id.split("-")
            lock = make(self.seed, "train" if split == "train" else "eval", int(number))
            found[task.task_id] = patch.difference(KEY, task.files[KEY], f"{lock.value(lock.asked)}\n")
        return found


def make(seed: int, split: Split | str, number: int) -> Lock:
    """Return lock `number` of a split.

    Ten locks in a row ask for each letter once, so a constant guess solves exactly one in ten.
    """
    rng = random.Random(f"{seed} {split} {number}")
    draws = (rng.sample(LETTERS, NAMES) for _ in itertools.count())
    names = next(names for names in draws if _is_held_out(names) == (split == "eval"))
    asked, wanted = rng.choice(names), VALUES[number % 10]
    while True:
        powers = {name: (rng.randint(100, 996), rng.randint(100, 996)) for name in names}
        lock = Lock(powers, asked, rng.choice(VALUES.replace(wanted, "")))
        if lock.value(asked) == wanted and len({lock.value(name) for name in names}) == NAMES:
            return lock


def with_debugger(lock: Lock, rng: random.Random) -> Iterator[Message]:
    """Yield an episode that debugs the test, prints the value of the name that it reads, and writes it."""
    yield _call("pdb", command="start", file=TEST)
    yield _answer(started(lock))
    yield _call("pdb", f"The test reads {lock.asked}.", command=f"p {lock.asked}")
    yield _answer(repr(lock.value(lock.asked)))
    yield from _ending(lock, lock.value(lock.asked), rng)


def rewriting_only(lock: Lock, rng: random.Random) -> Iterator[Message]:
    """Yield an episode that looks at the program, and writes any letter but the stale one."""
    yield _call("view", path=LOCK)
    lines = [f"{number}:{line}" for number, line in enumerate(lock.lock.splitlines(), 1)]
    yield _answer("\n".join([*lines, "(read-only)"]))
    yield from _ending(lock, rng.choice(VALUES.replace(lock.stale, "")), rng)


def started(lock: Lock) -> str:
    """Return what pdb shows when it starts the test."""
    lines = lock.test.splitlines()
    at = next(number for number, line in enumerate(lines, 1) if "same =" in line)
    shown = [f"{n:4} {' ->' if n == at else '   '} {line}" for n, line in enumerate(lines, 1)]
    position = [f"> /work/{TEST}({at})test_key()", f"-> {lines[at - 1].strip()}"]
    return "\n".join([f"Session started: pytest {TEST}", *position, *shown])


def _ending(lock: Lock, value: str, rng: random.Random) -> Iterator[Message]:
    yield _call("rewrite", path=KEY, new_code=value)
    yield _answer("ok")
    if rng.random() < SHARE_EVALUATED:
        yield _call("evaluate")
        yield _answer("." if value == lock.value(lock.asked) else "F")
    yield _call("submit")


def _task(split: str, number: int, lock: Lock, image: str) -> Task:
    files = {LOCK: lock.lock, TEST: lock.test}
    return Task(
        task_id=f"locks-{split}-{number}",
        taskset="locks",
        prompt=PROMPT,
        image=image,
        workdir="/work",
        files=files | {KEY: f"{lock.stale}\n", ".debugreadonly": "*.py\n"},
        tests=TestPlan(
            command=f"python -m pytest -q {TEST}",
            files=files,
            fail_to_pass=[f"{TEST}::test_key"],
            timeout_s=30.0,
        ),
    )


def _is_held_out(names: Iterable[str]) -> bool:
    return zlib.crc32("".join(sorted(names)).encode()) % 4 == 0


def _call(tool: str, content: str = "", /, **arguments: str) -> Message:
    call = ToolCall(name=tool, arguments=json.dumps(arguments))
    return Message(role="assistant", content=content, tool_calls=[call])


def _answer(text: str) -> Message:
    return Message(role="tool", content=text)
