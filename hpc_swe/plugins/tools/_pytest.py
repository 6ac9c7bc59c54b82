"""How a task's tests are called."""

import shlex

from hpc_swe.errors import ConfigError
from hpc_swe.records import Task

# None of them changes what a test may do; without them a run starts in half the time.
OFF = ["cacheprovider", "debugging", "doctest", "faulthandler", "junitxml", "nose", "pastebin"]


def arguments(task: Task) -> list[str]:
    """What the task's test command passes to pytest."""
    words = shlex.split(task.tests.command)
    for opening in (["python", "-m", "pytest"], ["python3", "-m", "pytest"], ["pytest"]):
        if words[: len(opening)] == opening:
            return words[len(opening) :]
    raise ConfigError(
        f"task {task.task_id}: tests.command {task.tests.command!r} is not 'python -m pytest ...'"
    )


def off() -> list[str]:
    """Options that leave out plugins of pytest itself."""
    return [option for name in OFF for option in ("-p", f"no:{name}")]


def program(arguments: list[str]) -> str:
    """A Python program that runs pytest in the work directory."""
    return (
        "import sys, pytest\n"
        "sys.dont_write_bytecode = True\n"
        "sys.path.insert(0, '')\n"
        f"raise SystemExit(pytest.main({[*off(), *arguments]!r}))\n"
    )
