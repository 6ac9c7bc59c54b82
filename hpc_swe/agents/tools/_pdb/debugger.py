# ruff: noqa: BLE001, PTH100, PTH109, PTH112, PTH113, PTH118, PTH120
"""Debug one program inside the sandbox for the tool `pdb`, with the host in the place of a terminal.

The text is sent there below those of `channel` and `breakable`: standard library only, for Python
3.7 and later. The host sends one request at a time, and each gets one answer, through two pipes that the
debugged program does not know. So the program may print or read whatever it likes, and `(Pdb)` in its output
means nothing. When the host sends the signal INTERRUPT, the program stops where it is, or the command that is
being evaluated does.

    request  {"runner", "words", "breakpoints", "signal"}, and then {"command"}
    answer   {"state", "note", "output", "context", "breakpoints"} or {"stale"}
"""

from __future__ import annotations

import bdb
import inspect
import io
import linecache
import os
import pdb
import signal
import sys
import threading
import types
from typing import Any, Callable, NoReturn  # noqa: UP035

# In a sandbox, these are in the texts above this one.
from hpc_swe.agents.tools._pdb.breakable import first_line, refusal
from hpc_swe.agents.tools._pdb.channel import MOST_NOTE_CHARS, Channel, Kept, clean, flush, stamp

OURS = "<debugger>"
"""The name of the file of these texts in the sandbox."""
MOST_LINE_CHARS = 200
MOST_CONDITION_CHARS = 1_000
AROUND = 5
"""Lines before and after the current one that are shown when the frame changes."""
MOST_BREAKPOINTS = 30
SKIPPED = ["_pytest.*", "pytest", "pluggy*", "unittest*", "importlib*", "runpy", "contextlib", "threading"]
"""Modules that are not stepped into."""
RUNNING, AT_PROMPT, IN_COMMAND = "running", "at the prompt", "in a command"


class CommandRefused(Exception):
    """A command cannot be carried out, for the reason in its text."""


class Debugger(pdb.Pdb):
    """Be pdb, with the host in the place of a terminal."""

    stdout: Kept  # type: ignore[assignment]

    def __init__(self, channel: Channel, request: dict[str, Any]) -> None:
        nothing, kept = io.StringIO(), Kept()
        super().__init__(stdin=nothing, stdout=kept, skip=SKIPPED, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.channel, self.process = channel, os.getpid()
        self.home = os.getcwd()
        self.program = os.path.join(self.home, request["words"][0].partition("::")[0])
        self.mode, self.note = RUNNING, ""
        self.entry: types.CodeType | None = None
        self.shown: object = None
        self.seen: dict[str, tuple[int, int]] = {}
        self.lock = threading.RLock()
        signal.signal(request["signal"], self.interrupted)
        os.register_at_fork(after_in_child=self.forked)
        self.take_calls()

    def take_calls(self) -> None:
        """Let `breakpoint()` and `pdb.set_trace()` stop here."""
        sys.breakpointhook = pdb.set_trace = self.called

    def restore(self, breakpoints: list[dict[str, Any]]) -> None:
        """Set the breakpoints of earlier sessions; drop those that their lines cannot hold any more."""
        for each in breakpoints:
            try:
                made = self.place(self.find(each["file"]), each["line"], each["condition"], each["temporary"])
            except CommandRefused as error:
                self.note += f"The breakpoint at {each['file']}:{each['line']} is removed: {error}.\n"
                continue
            made.enabled, made.ignore = each["enabled"], each["ignored"]

    def go(self, act: Callable[[], Any], entry: types.CodeType | None = None) -> Any:
        """Run something and return its result; stop at breakpoints, and where the code `entry` begins."""
        self.entry = entry
        self.reset()
        self.botframe = sys._getframe()
        self.set_continue()
        self.trace_again()
        try:
            return act()
        finally:
            sys.settrace(None)

    def trace_again(self) -> None:
        """Trace the program if there is anything to stop at."""
        if self.entry or self.breaks:
            sys.settrace(self.trace_dispatch)

    def stop_in(self, code: types.CodeType) -> None:
        """Stop at the first line of the next call of this code."""
        self.entry = code
        self.trace_again()

    def post_mortem(self, trace: types.TracebackType | None, note: str) -> None:
        """Show the frames of an exception that nothing has caught, until the policy goes on."""
        sys.settrace(None)
        self.note += f"{note}\nIts frames can be inspected (w, u, d, p); c goes on.\n"
        while trace and trace.tb_next and not self.is_own(trace.tb_frame):
            trace = trace.tb_next
        self.interaction(None, trace)
        self.set_continue()
        self.trace_again()

    # What bdb and pdb call.

    def dispatch_call(self, frame: types.FrameType, arg: Any) -> Any:
        if self.entry is not None and frame.f_code is self.entry:
            self.entry = None
            self.set_step()
            return self.trace_dispatch
        return super().dispatch_call(frame, arg)

    def stop_here(self, frame: types.FrameType) -> bool:
        return frame.f_code.co_filename != OURS and super().stop_here(frame)

    def interaction(self, frame: types.FrameType | None, *rest: Any) -> None:
        with self.lock:  # breakpoint() may be called in several threads
            super().interaction(frame, *rest)

    def get_stack(self, f: Any, t: Any) -> tuple[list[tuple[types.FrameType, int]], int]:
        """Leave out the frames of the runner below the program's, and after a crash those above them."""
        stack, place = super().get_stack(f, t)
        own = [n for n, (frame, _) in enumerate(stack) if self.is_own(frame)]
        first, last = (own[0], own[-1]) if own else (0, len(stack) - 1)
        last, place = (last, last) if t else (len(stack) - 1, place)
        first = min(first, place)
        return stack[first : last + 1], place - first

    def is_own(self, frame: types.FrameType) -> bool:
        """Return whether a frame is of a file of the work directory."""
        path = self.canonic(frame.f_code.co_filename)
        return path.startswith(self.home + os.sep) and "site-packages" not in path

    def cmdloop(self, intro: Any = None) -> None:
        stop: Any = False
        while not stop:
            line = self.cmdqueue.pop(0) if self.cmdqueue else self.next_command()
            try:
                self.mode = IN_COMMAND
                line = self.precmd(line)
                stop = self.postcmd(self.onecmd(line), line)
            except KeyboardInterrupt:
                self.error("interrupted")
            except CommandRefused as error:
                self.error(str(error))
        self.mode = RUNNING

    # What talks to the host.

    def next_command(self) -> str:
        """Answer the last request, and return the next one's command."""
        self.mode = AT_PROMPT
        self.answer("stopped")
        while True:
            command = str(self.channel.receive()["command"])
            changed = [path for path, state in self.sources().items() if self.seen.get(path, state) != state]
            if not changed:
                return command
            self.channel.send({"stale": [self.named(path) for path in changed][:10]})

    def answer(self, state: str) -> None:
        flush()
        answer = {
            "state": state,
            "note": self.note[:MOST_NOTE_CHARS],
            "output": self.stdout.take(),
            "context": self.context() if state == "stopped" else "",
            "breakpoints": [self.described(each) for each in self.made()][:MOST_BREAKPOINTS],
        }
        self.note = ""
        self.seen = self.sources()
        self.channel.send({key: clean(value) for key, value in answer.items()})

    def end(self, note: str) -> NoReturn:
        """Give the last answer, and end this process without the program's say."""
        self.note += note
        self.answer("ended")
        os._exit(0)

    def context(self) -> str:
        """Return the lines around the current one if it is another one than in the last answer."""
        if self.curframe is None or not self.stack:
            return ""
        frame, line = self.stack[self.curindex]
        shown, self.shown = self.shown, (id(frame), frame.f_code, line)
        lines = linecache.getlines(self.canonic(frame.f_code.co_filename), frame.f_globals)
        if shown == self.shown or not lines:
            return ""
        marked = {each.line for each in self.made() if each.file == self.canonic(frame.f_code.co_filename)}
        found = []
        for number in range(max(line - AROUND, 1), min(line + AROUND, len(lines)) + 1):
            mark = ("B" if number in marked else " ") + ("->" if number == line else "  ")
            found.append(f"{number:4} {mark} {lines[number - 1].rstrip()[:MOST_LINE_CHARS]}")
        return "\n".join(found)

    def sources(self) -> dict[str, tuple[int, int]]:
        """Return time of change and size of the files whose code runs, and of those with breakpoints."""
        paths = {self.program, *(each.file for each in self.made())}
        for module in list(sys.modules.values()):
            try:
                paths.add(str(module.__file__))
            except Exception:  # the program may put anything there
                continue
        own = [path for path in paths if path.startswith(self.home + os.sep)]
        return {path: stamp(path) for path in own if path.endswith(".py")}

    def made(self) -> list[bdb.Breakpoint]:
        return [each for each in bdb.Breakpoint.bpbynumber if each]

    def described(self, made: bdb.Breakpoint) -> dict[str, object]:
        return {
            "file": self.named(made.file),
            "line": made.line,
            "condition": made.cond or "",
            "temporary": bool(made.temporary),
            "enabled": bool(made.enabled),
            "ignored": made.ignore,
        }

    def named(self, path: str) -> str:
        return path[len(self.home) + 1 :] if path.startswith(self.home + os.sep) else path

    def interrupted(self, number: int, frame: types.FrameType | None) -> None:
        """Stop the program where it is, or the evaluation of a command."""
        if os.getpid() != self.process or self.mode == AT_PROMPT:
            return
        if self.mode == IN_COMMAND:
            raise KeyboardInterrupt
        tracing = sys.gettrace()
        sys.settrace(None)
        files = (OURS, bdb.__file__, pdb.__file__)
        while frame and frame.f_code.co_filename in files and frame.f_back:
            frame = frame.f_back
        self.note += "The program was interrupted; c goes on.\n"
        outer = frame
        while outer:
            outer.f_trace = None  # before Python 3.10 a frame's line is out of date while this is set
            outer.f_trace = self.trace_dispatch
            outer = None if outer is self.botframe else outer.f_back
        self.set_step()
        self.interaction(frame, None)
        if self.breaks or self.stopframe is not self.botframe or self.entry:
            sys.settrace(tracing or self.trace_dispatch)

    def called(self, *arguments: Any, **named: Any) -> None:
        """Stop where the program calls `breakpoint()` or `pdb.set_trace()`."""
        if os.getpid() == self.process:
            self.set_trace(sys._getframe().f_back)

    def forked(self) -> None:
        """Debug no child of the program; it goes on by itself."""
        sys.settrace(None)
        self.channel.close()

    # Commands that differ from pdb's own.

    def do_break(self, arg: str, temporary: Any = False) -> None:
        """Set a breakpoint: b LINE, b FILE:LINE or b FUNCTION, then a comma and a condition; b lists all."""
        if not arg:
            super().do_break(arg)
            return
        where, _, condition = arg.partition(",")
        path, line = self.located(where.strip())
        made = self.place(path, line, condition.strip(), temporary)
        self.message(f"Breakpoint {made.number} at {self.named(path)}:{line}")

    def do_clear(self, arg: str) -> None:
        """Remove breakpoints: cl FILE:LINE or cl NUMBER; cl removes all."""
        if not arg:
            self.clear_all_breaks()
            self.message("All breakpoints are removed")
        elif ":" in arg:
            path, line = self.located(arg)
            found = [each for each in self.made() if (each.file, each.line) == (path, line)]
            if not found:
                raise CommandRefused(f"there is no breakpoint at {self.named(path)}:{line}")
            for each in found:
                self.clear_bpbynumber(each.number)
                self.message(f"Deleted breakpoint {each.number} at {self.named(path)}:{line}")
        else:
            super().do_clear(arg)

    def do_quit(self, arg: str) -> NoReturn:
        """End the session."""
        self.end("The session has ended.\n")

    def refuse(self, arg: str) -> None:
        raise CommandRefused("the debugger has no terminal for this command")

    do_b = do_break
    do_cl = do_clear
    do_q = do_exit = do_EOF = do_quit
    do_interact = do_commands = do_debug = refuse

    def located(self, where: str) -> tuple[str, int]:
        """Return the file and line of LINE, FILE:LINE or a function's name."""
        file, colon, number = where.rpartition(":")
        if number.strip().isdigit():
            return self.find(file) if colon else self.current_file(), int(number)
        try:
            frame = self.stack[self.curindex][0]
            code = inspect.unwrap(eval(where, frame.f_globals, frame.f_locals)).__code__
        except Exception:
            raise CommandRefused(
                f"{where!r} is neither LINE, FILE:LINE nor a function that is known here"
            ) from None
        return self.canonic(code.co_filename), first_line(code)

    def current_file(self) -> str:
        return self.canonic(self.curframe.f_code.co_filename) if self.curframe else self.program

    def find(self, file: str) -> str:
        """Return the path of a file that is named from the work directory, as a module or absolutely."""
        candidates = [os.path.join(self.home, file), os.path.join(os.path.dirname(self.program), file)]
        for path in filter(None, [*candidates, self.lookupmodule(file)]):
            if os.path.isfile(path):
                return self.canonic(os.path.realpath(path))
        raise CommandRefused(f"there is no file {file!r}")

    def place(self, path: str, line: int, condition: str, temporary: bool) -> bdb.Breakpoint:
        """Set a breakpoint in the place of any other at the same line.

        Raise CommandRefused if the line cannot hold one, or the condition is no expression.
        """
        linecache.checkcache(path)
        reason = refusal("".join(linecache.getlines(path)), line)
        if len(condition) > MOST_CONDITION_CHARS:
            reason = f"the condition has more than {MOST_CONDITION_CHARS} characters"
        try:
            compile(condition or "0", "<condition>", "eval")
        except (SyntaxError, ValueError) as error:
            reason = f"the condition is no expression: {error}"
        for each in self.made():
            if not reason and (each.file, each.line) == (path, line):
                self.clear_bpbynumber(each.number)
        if len(self.made()) >= MOST_BREAKPOINTS:
            reason = f"there are {MOST_BREAKPOINTS} breakpoints already"
        reason = reason or str(self.set_break(path, line, temporary, condition or None) or "")
        if reason:
            raise CommandRefused(reason)
        return bdb.Breakpoint.bplist[path, line][-1]
