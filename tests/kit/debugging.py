"""A debugging session as the policy has it: call after call, each answered by text.

As a program it opens a session in the sandbox of type KIND, says that a program runs in it, and waits to be
killed: debugging KIND
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec.structs import replace

from hpc_swe.agents.sandboxes.base import Sandbox, Sandboxes
from hpc_swe.agents.tools.base import ToolError, invoke
from hpc_swe.base.loader import load
from hpc_swe.base.records import Task
from tests.kit.checkout import IMAGES
from tests.kit.images import require_apptainer
from tests.kit.scripted import SMALL

CALC = '''"""Sums of numbers.

More of the docstring.
"""


def total(values):
    # add them up
    result = 0
    for value in values:
        result += value
    return result


def ratio(a, b):
    above = total(a)
    return above / total(b)


if __name__ == "__main__":
    print("ratio", ratio([1, 2, 3], [4]))
    print("done")
'''
TESTS = """import unittest

from calc import ratio, total


def test_total():
    values = [1, 2]
    assert total(values) == 3


def test_ratio():
    assert ratio([1], []) == 0


class TestMore(unittest.TestCase):
    def test_more(self):
        self.assertEqual(total([5]), 6)
"""


def task(**files: str) -> Task:
    """A task with these files, named without `.py`."""
    named = {f"{name}.py": text for name, text in files.items()}
    plan = replace(SMALL.tests, command="python -m pytest -q test_calc.py")
    return replace(SMALL, files=named, tests=plan)


class Session:
    """What one episode does with the tool and its sandbox."""

    def __init__(self, sandbox: Sandbox, tool: Any, of: Task) -> None:
        self.sandbox, self.tool, self.task = sandbox, tool, of

    def __call__(self, command: str, **words: str) -> str:
        try:
            return invoke(self.tool, json.dumps({"command": command, **words}), self.sandbox, self.task)
        except ToolError as error:
            return f"error: {error}"

    def start(self, file: str, **words: str) -> str:
        return self("start", file=file, **words)

    def hurry(self, timeout_s: float, grace_s: float = 20.0) -> None:
        """Give the following calls less time than the start of a program may take on a busy machine."""
        self.tool.tool = msgspec.structs.replace(self.tool.tool, timeout_s=timeout_s, grace_s=grace_s)

    def write(self, path: str, text: str) -> None:
        self.sandbox.write(path, text.encode())

    def use(self, name: str, /, **arguments: object) -> str:
        return invoke(load("tools", {"type": name}), json.dumps(arguments), self.sandbox, self.task)


@contextmanager
def session(sandboxes: Sandboxes, of: Task, **fields: object) -> Iterator[Session]:
    """Open a sandbox, and the debugger in it."""
    tool = load("tools", {"type": "pdb", "timeout_s": 60.0, **fields})
    with sandboxes.open(of) as sandbox, tool.open(sandbox, of) as opened:
        yield Session(sandbox, opened, of)


def require(kind: str) -> str:
    """Skip the test where this machine has no such sandbox."""
    if kind == "apptainer":
        require_apptainer()
    return kind


def made(kind: str) -> Sandboxes:
    table = {"type": kind} | ({"images": str(IMAGES)} if kind == "apptainer" else {})
    sandboxes: Sandboxes = load("sandboxes", table)
    return sandboxes


def main() -> None:
    program = "import os, sys, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
    with session(made(sys.argv[1]), task(spin=program), timeout_s=1000.0) as debug:
        debug.start("spin.py")
        print("started", flush=True)
        if len(sys.argv) > 2:
            debug("c")  # until this process is killed
        time.sleep(1000)


if __name__ == "__main__":
    main()
