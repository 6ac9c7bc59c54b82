"""Make tests of cases: each gives an input to a program or a function, and expects an output.

What is expected is a literal of an assertion, so the grader takes it out of the test before the program runs.
"""

from collections.abc import Iterable, Sequence
from typing import Any

MOST_CASES = 20
"""Cases of a task; of more cases these are chosen at equal distances."""
MOST_CHARACTERS = 100_000
"""Characters of a case, input and output together; longer cases are left out."""
MOST_VISIBLE = 3
"""Cases that the agent sees: the shortest ones, and half of all at most."""

_PROGRAM = '''import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile

LIMIT_S = 6
MOST_BYTES = 1_000_000
late = []


def output(text):
    """Run solution.py on an input; return what it prints, without spaces and lines at ends."""
    if late:
        raise TimeoutError("the program took too long in an earlier test")
    given, printed, errors = (tempfile.TemporaryFile() for _ in range(3))
    given.write(text.encode())
    given.seek(0)
    command, files = [sys.executable, "solution.py"], {"stdin": given, "stdout": printed, "stderr": errors}
    program = subprocess.Popen(command, **files, preexec_fn=os.setpgrp)
    resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))
    with contextlib.suppress(PermissionError):  # the grader has set a smaller limit
        resource.prlimit(program.pid, resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))
    status = program.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        late.append(True)
    printed.seek(0)
    errors.seek(0)
    if status:
        raise RuntimeError(f"exit status {status}: {errors.read()[-1000:].decode(errors='replace')}")
    lines = printed.read(MOST_BYTES).decode(errors="replace").rstrip().split("\\n")
    return "\\n".join(line.rstrip() for line in lines)
'''
_CALL = '''import json

from solution import {name}


def result(*arguments):
    """Call the function; its value is compared as JSON, so that tuples are lists."""
    return json.loads(json.dumps({name}{method}(*arguments)))
'''


def of_programs(cases: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Return the tests of a program that reads standard input, all of them and those that the agent sees.

    A case is an input and what must be printed; spaces at ends of lines, and lines at the end, do not count.
    Raise ValueError if no case can be used.
    """
    return _modules(_PROGRAM, [f"output({given!r}) == {trimmed(expected)!r}" for given, expected in cases])


def of_calls(name: str, method: str, cases: Iterable[tuple[Sequence[Any], Sequence[Any]]]) -> tuple[str, str]:
    """Return the tests of a function, or of a method of an instance of a class, as `of_programs` does.

    A case holds the arguments and all values that are right. Raise ValueError if no case can be used.
    """
    head = _CALL.format(name=name, method=f"().{method}" if method else "")
    return _modules(
        head,
        [
            f"result({', '.join(map(repr, given))}) "
            + (f"== {right[0]!r}" if len(right) == 1 else f"in {[*right]!r}")
            for given, right in cases
        ],
    )


def trimmed(text: str) -> str:
    """Return a text without spaces at ends of lines, and without lines at its end."""
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def _modules(head: str, conditions: Sequence[str]) -> tuple[str, str]:
    short = [one for one in dict.fromkeys(conditions) if len(one) <= MOST_CHARACTERS]
    if not short:
        what = f"each has more than {MOST_CHARACTERS} characters" if conditions else "there is none"
        raise ValueError(f"no case can be used: {what}")
    count = min(len(short), MOST_CASES)
    chosen = [short[n * len(short) // count] for n in range(count)]
    tests = [f"\n\ndef test_{n}():\n    assert {one}\n" for n, one in enumerate(chosen)]
    shortest = sorted(range(count), key=lambda n: len(tests[n]))[: max(1, min(MOST_VISIBLE, count // 2))]
    return head + "".join(tests), head + "".join(tests[n] for n in sorted(shortest))
