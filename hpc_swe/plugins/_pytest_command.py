"""Build the command that runs a task's tests."""

import shlex

from hpc_swe.errors import ConfigError
from hpc_swe.records import Task

# None of these plugins changes what a test may do; without them a run starts in half the time.
UNUSED_PLUGINS = ["cacheprovider", "doctest", "faulthandler", "junitxml", "nose", "pastebin"]


def arguments(task: Task) -> list[str]:
    """Return the arguments that the task's test command passes to pytest.

    Raises:
        ConfigError: The command is no call of pytest.
    """
    words = shlex.split(task.tests.command)
    for opening in (["python", "-m", "pytest"], ["python3", "-m", "pytest"], ["pytest"]):
        if words[: len(opening)] == opening:
            return words[len(opening) :]
    raise ConfigError(
        f"task {task.task_id}: tests.command {task.tests.command!r} is not 'python -m pytest ...'"
    )


def disabling_options() -> list[str]:
    """Return the options that disable plugins of pytest itself."""
    return [option for name in UNUSED_PLUGINS for option in ("-p", f"no:{name}")]


def program(arguments: list[str]) -> str:
    """Return a Python program that runs pytest in the work directory."""
    return (
        "import sys, pytest\n"
        "sys.dont_write_bytecode = True\n"
        "sys.path.insert(0, '')\n"
        f"raise SystemExit(pytest.main({[*disabling_options(), *arguments]!r}))\n"
    )
