# ruff: noqa: BLE001, PTH120, PTH123
"""Run a file or pytest under the debugger in a sandbox.

The text is sent there as the last part of the debugger: standard library and pytest only, for Python 3.7 and
later.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

from hpc_swe.agents.tools._pdb.channel import Channel, flush

# In a sandbox, these are in the texts above this one.
from hpc_swe.agents.tools._pdb.debugger import OURS, Debugger

PYTEST_OPTIONS = ["-s", "-q", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore:Module already imported"]
"""A warm interpreter loads plugins before pytest can rewrite their assertions, and pytest would say so."""


class Hooks:
    """Stop in the first test, and after each failure, from inside pytest."""

    def __init__(self, debugger: Debugger) -> None:
        self.debugger, self.has_begun = debugger, False

    def pytest_sessionstart(self) -> None:
        self.debugger.take_calls()  # pytest has put its own in their place

    def pytest_runtest_call(self, item: Any) -> None:
        try:
            code = inspect.unwrap(item.obj).__code__
        except Exception:  # not every test is a function
            return
        if not self.has_begun:
            self.has_begun = True
            self.debugger.stop_in(code)

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        error = call.excinfo.value
        self.debugger.post_mortem(error.__traceback__, f"{node.nodeid} failed: {described(error)}")


def run_pytest(debugger: Debugger, words: list[str]) -> str:
    """Run pytest, and return how it ended."""
    import pytest

    sys.path.insert(0, "")
    pytest.hookimpl(tryfirst=True)(Hooks.pytest_runtest_call)
    hooks = Hooks(debugger)
    status = debugger.go(lambda: pytest.main([*PYTEST_OPTIONS, *words], plugins=[hooks]))
    return f"pytest has ended with exit status {status:d}"


def forget_modules(folder: str) -> None:
    """Let imports find the folder's own files, where this process has loaded modules of the same names."""
    own = {name.partition(".")[0] for name in os.listdir(folder)}
    for name, module in list(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if name.partition(".")[0] in own and origin not in (None, "built-in", "frozen"):
            del sys.modules[name]


def run_script(debugger: Debugger, words: list[str]) -> str:
    """Run a file as ``python FILE`` does, and return how it ended."""
    path = debugger.program
    forget_modules(os.path.dirname(path))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = path
    sys.argv[:] = [path, *words[1:]]
    sys.path.insert(0, os.path.dirname(path))
    debugger.go(lambda: exec(code, main.__dict__), entry=code)
    return "the program has ended"


def run_all(debugger: Debugger, request: dict[str, Any]) -> str:
    """Run the program, and return how it ended."""
    run = run_pytest if request["runner"] == "pytest" else run_script
    try:
        how = run(debugger, request["words"])
    except SystemExit as error:
        how = f"the program has ended with exit status {error.code!r}"[:200]
    except BaseException as error:
        if os.getpid() != debugger.process:
            raise
        what = described(error)
        how = f"the program has ended with {what}"
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == OURS:
            trace = trace.tb_next
        if trace:
            debugger.post_mortem(trace, f"The program crashed: {what}")
    return how


def main(numbers: list[str]) -> NoReturn:
    """Debug the program that the first request names, and end this process with it."""
    sys.dont_write_bytecode = True
    channel = Channel(numbers)
    request = channel.receive()
    debugger = Debugger(channel, request)
    debugger.restore(request["breakpoints"])
    how = run_all(debugger, request)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    if os.getpid() != debugger.process:
        flush()
        os._exit(0)  # a child that the program forked
    debugger.end(f"{how[:1].upper()}{how[1:]}.\n")


def described(error: BaseException) -> str:
    """Return an exception's type and message, as the last line of a traceback has them."""
    return traceback.format_exception_only(type(error), error)[-1].strip()[:1000]
