# ruff: noqa: BLE001
"""Run a program in a fork of an interpreter that has loaded what programs need.

The text is sent to a container above that of `container`, and to the interpreter of `process` sandboxes
above that of `forks`: standard library only.
"""

import contextlib
import gc
import os
import sys
import traceback
import types

WARM_UP = """
import importlib
try:
    import pluggy, pytest, _pytest.config
    pluggy.__version__ = pluggy.__version__  # each run of pytest would look it up in files three times
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
prepared: dict[str, types.ModuleType] = {}
"""Prelude -> the module in which it has run; the forks of this interpreter inherit it."""
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


def prepare(files: list[int]) -> None:
    """Run the preludes in files, and close these; a prelude that fails does so again in each program."""
    for file in files:
        with contextlib.suppress(BaseException):
            text, main = os.pread(file, os.fstat(file).st_size, 0).decode(), types.ModuleType("__main__")
            exec(compile(text, "<prelude>", "exec"), main.__dict__)
            prepared[text] = main
        os.close(file)
    gc.collect()
    gc.freeze()


def execute(program: str, arguments: list[str], environment: dict[str, str]) -> int:
    """Run a program as ``python3 -I`` does, and return its exit code.

    The text may begin with a prelude and a NUL. Other preludes are forgotten.
    """
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = ["", *arguments]
    prelude, _, program = program.rpartition("\0")
    main, known = types.ModuleType("__main__"), prepared.pop(prelude, None)
    prepared.clear()
    code: object = None
    try:
        sys.modules["__main__"] = main = known or main
        if not known:
            exec(compile(prelude, "<prelude>", "exec"), main.__dict__)
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
