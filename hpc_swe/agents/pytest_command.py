"""Build the command that runs a task's tests."""

import os
import posixpath
import shlex
from collections.abc import Mapping

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Task

_UNUSED = ("cacheprovider", "doctest", "faulthandler", "junitxml", "nose", "pastebin")
FEWER_PLUGINS = [option for name in _UNUSED for option in ("-p", f"no:{name}")]
"""Options that disable plugins of pytest itself which change no test; a run then starts in half the time.

Without the options of the plugin "debugging" every test of a unittest.TestCase would fail.
"""

_NO_WARNING = ["-W", "ignore:Module already imported"]
"""The warm interpreter loads plugins before pytest can rewrite their assertions, and pytest would say so."""

_SETTINGS = dict.fromkeys(("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"), "")
_SETTINGS |= {"pyproject.toml": "[tool.pytest", "tox.ini": "[pytest]", "setup.cfg": "[tool:pytest]"}
"""File of settings, in pytest's order -> what it must hold to be one."""

_SHOWN_FAST = """
class ShownFast:
    def __init__(self):
        from _pytest._code import code
        self.plain, self.known = code.getstatementrange_ast, {}
        code.getstatementrange_ast = self.found
    def found(self, lineno, source, assertion=False, astnode=None):
        lines, key = self.known.setdefault(str(source), {}), (lineno, assertion)
        if key not in lines:
            node = next(iter(lines.values()))[0] if lines else astnode
            lines[key] = self.plain(lineno, source, assertion, node)
        return lines[key]
    def pytest_sessionfinish(self):
        self.known.clear()  # pytest now collects garbage, which takes long over syntax trees
    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo):
        if "KeyboardInterrupt" not in repr(excinfo.value):  # only the message is shown
            plain = excinfo.getrepr
            excinfo.getrepr = lambda **named: plain(**{**named, "style": "native"})
try:
    plugins = [ShownFast()]
except (ImportError, AttributeError):  # another release of pytest
    plugins = []
"""
"""A plugin for failures: pytest parses the files of a traceback anew for each test that fails, and those of
its own functions for the words "1 error during collection". What it shows stays the same."""


def arguments(task: Task) -> list[str]:
    """Return what the task's test command passes to pytest; raise ConfigError if it is no call of pytest."""
    try:
        words = shlex.split(task.tests.command)
    except ValueError:  # a quotation mark that nothing closes
        words = []
    for opening in (["python", "-m", "pytest"], ["python3", "-m", "pytest"], ["pytest"]):
        if words[: len(opening)] == opening:
            return words[len(opening) :]
    raise ConfigError(
        f"task {task.task_id}: tests.command {task.tests.command!r} is not 'python -m pytest ...'"
    )


def own_settings(files: Mapping[str, str]) -> list[str]:
    """Return options with which pytest reads settings of these files alone, and none of a folder above.

    The work directory of a `process` sandbox lies where all users may write.
    """
    own = [name for name, section in _SETTINGS.items() if name in files and section in files[name]]
    return ["-c", [*own, os.devnull][0], "--rootdir=.", "--confcutdir=."]


def visible(task: Task) -> list[str]:
    """Return the arguments that name tests among the task's own files, which an agent can see and run.

    A command that names nothing runs what lies in the work directory. Return nothing if the task has no files
    of its own, as a repository's tasks, or if the command is no call of pytest.
    """
    if not task.files:
        return []
    try:
        given = arguments(task)
    except ConfigError:
        return []
    places = [each for each in given if not each.startswith("-")] or ["."]
    return [each for each in places if _holds(each.partition("::")[0], task)]


def _holds(place: str, task: Task) -> bool:
    path = posixpath.normpath(place)
    return path == "." or any(file == path or file.startswith(f"{path}/") for file in task.files)


def program(arguments: list[str]) -> str:
    """Return a Python program that runs pytest in the work directory."""
    return (
        f"import sys, pytest\n{_SHOWN_FAST}"
        "sys.dont_write_bytecode = True\n"
        "sys.path.insert(0, '')\n"
        f"raise SystemExit(pytest.main({[*FEWER_PLUGINS, *_NO_WARNING, *arguments]!r}, plugins))\n"
    )
