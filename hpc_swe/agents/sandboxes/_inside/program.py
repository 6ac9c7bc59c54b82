# ruff: noqa: BLE001
"""Run a program in a fork of an interpreter that has loaded what programs need.

The text is sent to a container above that of `container`, and to the interpreter of `process` sandboxes
above that of `forks`: standard library only.
"""

import contextlib
import os
import sys
import traceback
import types

WARM_UP = """
import importlib
try:
    import pytest, _pytest.config
    for name in (*(f"_pytest.{name}" for name in _pytest.config.default_plugins), "hmac", "pdb", "readline"):
        importlib.import_module(name)
    # Every run of pytest asks all installed packages for plugins: remember what they say.
    from importlib import metadata
    known = {str(getattr(each, "_path", each)): each.entry_points for each in metadata.distributions()}
    read = metadata.Distribution.entry_points.fget
    recall = lambda self: known[path] if (path := str(getattr(self, "_path", ""))) in known else read(self)
    metadata.Distribution.entry_points = property(recall)
    for point in sorted({each for points in known.values() for each in points if each.group == "pytest11"}):
        try:
            point.load()
        except (Exception, pytest.skip.Exception) as error:
            print("not loaded:", point, error, flush=True)
    import hypothesis  # its plugin loads it at the end of every run
except Exception as error:
    print("not loaded:", error, flush=True)
# A shown failure looks for the file of each loaded module, thousands of calls: remember them.
import inspect
try:
    inspect.getmodule(compile("", "warm_up", "exec"))
except Exception as error:
    print("not remembered:", error, flush=True)
"""
"""Loads pytest with its plugins, before any code of a task is there."""
THREADS = ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMEXPR", "RAYON")
"""Libraries that start a thread for each core of the node, unless a variable of theirs says how many."""


def thread_variables(threads: int) -> dict[str, str]:
    """Return the variables with which each of these libraries starts so many threads; 0 sets none."""
    return {f"{name}_NUM_THREADS": str(threads) for name in THREADS} if threads else {}


def reap(*_: object) -> None:
    """Collect all children that have ended, as the handler of SIGCHLD; their time then counts for us."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def fork_for(host: int) -> int:
    """Fork for a new sandbox or command; refuse that one, and return -1, if no process may be started."""
    try:
        return os.fork()
    except OSError as error:  # other programs of the job may have used up its processes
        with contextlib.suppress(OSError):
            os.write(host, f"failed: {error}".encode())
        return -1


def execute(program: str, arguments: list[str], environment: dict[str, str]) -> int:
    """Run a program as ``python3 -I`` does, and return its exit code."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = ["", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code: object = None
    try:
        exec(compile(program, "<program>", "exec"), main.__dict__)
    except SystemExit as end:
        code = end.code
    except BaseException:
        code = traceback.format_exc()
    sys.stdout.flush()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)
