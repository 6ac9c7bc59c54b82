"""Debug a program in a session that lasts from call to call."""

import re
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from hpc_swe.agents.sandboxes.base import INTERRUPT, ProgramSession, Sandbox, SessionEnded
from hpc_swe.agents.tools._pdb.breakpoints import Breakpoint, moved
from hpc_swe.agents.tools._text.files import name, read_text
from hpc_swe.agents.tools.base import SandboxBroken, Tool, ToolError, below, cut
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Task

_PARTS = [
    Path(__file__).with_name("_pdb") / f"{part}.py" for part in ("channel", "breakable", "debugger", "run")
]
_MOST_COMMAND_CHARS = 10_000
_MOST_FILE_CHARS = 2_000
"""Characters of what to debug, arguments included; answers repeat them."""
_MOST_TEXT_CHARS = 200_000
"""Characters of a file whose breakpoints are followed through changes; a host has many episodes."""
_MOST_BREAKPOINTS = 30
"""The debugger sets no more either; what comes back from the sandbox may name any number."""
_ON_BREAKPOINTS = ("b", "break", "tbreak", "cl", "clear", "condition", "disable", "enable", "ignore")


def _program() -> str:
    """Return the debugger as one text, which runs under a name that no file of a program has."""
    texts = [part.read_text(encoding="utf-8") for part in _PARTS]
    future = "from __future__ import annotations\n"
    text = future + re.sub(r"(?m)^from (hpc_swe|__future__).*$", "", "\n\n".join(texts))
    return f"exec(compile({text!r}, '<debugger>', 'exec'))\nmain(sys.argv[1:])\n"


_PROGRAM = _program()


class Pdb(Plugin, Tool, frozen=True, kw_only=True):
    """Debug with pdb: first the command "start" with a runner (python or pytest) and a file, then pdb's."""

    timeout_s: float = 30.0
    """Seconds that the program may run in one call before it is interrupted."""
    grace_s: float = 5.0
    """Seconds after an interruption within which the program must stop; its session ends otherwise."""
    most_chars: int = 8000
    """Characters of an answer."""
    python: str = ""
    """Path in the sandbox of the interpreter of the debugged programs; empty means the sandbox's own."""

    @contextmanager
    def open(self, sandbox: Sandbox, task: Task) -> Iterator["_Debugging"]:
        """Return the tool for one episode; at exit its session ends, with all that it started."""
        with ExitStack() as life:
            yield _Debugging(self, sandbox, task, life)

    def __call__(
        self, sandbox: Sandbox, task: Task, *, command: str, runner: str = "", file: str = ""
    ) -> str:
        """Debug for one call alone."""
        with self.open(sandbox, task) as tool:
            return tool(sandbox, task, command=command, runner=runner, file=file)


class _Start(Struct, frozen=True):
    """Say what a session debugs."""

    runner: str
    words: list[str]
    """The file, or FILE::TEST, and further arguments."""

    def __str__(self) -> str:
        return f"{self.runner} {shlex.join(self.words)}"


class _Answer(Struct):
    """Hold an answer of the debugger; the policy's code may have written it."""

    state: Literal["stopped", "ended"] = "ended"
    note: str = ""
    output: str = ""
    context: str = ""
    breakpoints: list[Breakpoint] = []
    stale: list[str] = []
    """Files that have changed, instead of an answer: the command was not carried out."""


@dataclass
class _Debugging(Tool):
    """Keep a session, its breakpoints, and the texts that their lines count in."""

    tool: Pdb
    sandbox: Sandbox
    task: Task
    life: ExitStack
    start: _Start | None = None
    session: ProgramSession | None = None
    breakpoints: list[Breakpoint] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    """What the answer to the current call says so far."""

    def __call__(
        self, sandbox: Sandbox, task: Task, *, command: str, runner: str = "", file: str = ""
    ) -> str:
        """Carry out a command and return what it shows."""
        if len(command) > _MOST_COMMAND_CHARS or "\0" in command:
            raise ToolError(f"A command has no NUL and at most {_MOST_COMMAND_CHARS} characters.")
        self.said = []
        word, _, rest = command.strip().partition(" ")
        if word in ("start", "restart", "run"):
            self.start = _start(runner, below(task, (file or rest).strip()), self.start)
            self._begin()
        elif self.start is None:
            raise ToolError(
                'Nothing is being debugged; call with command "start", a runner and a file first.'
            )
        else:
            self._carry_out(command.strip(), word)
        return cut("\n".join(filter(None, (text.strip("\n") for text in self.said))), self.tool.most_chars)

    def _carry_out(self, command: str, word: str) -> None:
        if self.session is None:
            self.said.append("The program was not running, and was started again.")
            self._begin(quietly=True)
        answer = self._ask({"command": command})
        if answer and answer.stale:
            files = ", ".join(map(name, answer.stale))
            self.said.append(f"{files} changed, so the program was started again.")
            self._begin(quietly=True)
            answer = self._ask({"command": command})
        if answer:
            self._show(answer)
            if word in _ON_BREAKPOINTS and command not in ("b", "break", "tbreak"):  # which list them
                self._show_breakpoints()

    def _begin(self, quietly: bool = False) -> None:
        """Start a new session with the breakpoints of the one before, moved to where their lines are now."""
        self._end()
        self._move_breakpoints()
        try:
            self.session = self.life.enter_context(self.sandbox.session(_PROGRAM, self.tool.python))
        except SessionEnded as error:
            raise SandboxBroken(str(error)) from None
        assert self.start is not None
        request = msgspec.to_builtins(self.start) | {
            "breakpoints": msgspec.to_builtins(self.breakpoints),
            "signal": int(INTERRUPT),
        }
        if not quietly:
            self.said.append(f"Session started: {self.start}")
        answer = self._ask(request)
        if answer:
            self._show(answer)
            self._show_breakpoints()

    def _move_breakpoints(self) -> None:
        kept = []
        for each in self.breakpoints:
            old, new = self.texts.get(each.file), self._text(each.file)
            found = each if old is None or new is None else moved(each, old.split("\n"), new.split("\n"))
            if found is None:
                self.said.append(f"The breakpoint at {name(str(each))} is removed: its line was deleted.")
            else:
                kept.append(found)
        self.breakpoints = kept

    def _text(self, path: str) -> str | None:
        """Return the text of a file of the work directory; None for large ones and others."""
        try:
            text = read_text(self.sandbox, self.task, path)
        except ToolError:
            return None
        return text if len(text) <= _MOST_TEXT_CHARS else None

    def _ask(self, request: dict[str, object]) -> _Answer | None:
        """Return the debugger's answer; None when there is no session any more, which has been said."""
        if self.session is None:
            return None
        began = time.monotonic()
        try:
            try:
                answer = self.session.ask(msgspec.json.encode(request), self.tool.timeout_s)
            except TimeoutError:
                self.said.append(
                    f"[the program ran for {time.monotonic() - began:.0f} s and was interrupted]"
                )
                self.session.interrupt()
                answer = self.session.wait(self.tool.grace_s)
            decoded = msgspec.json.decode(answer, type=_Answer)
        except TimeoutError:
            self._lose("It did not stop, so the session was ended.")
        except SessionEnded as error:
            if error.broke_sandbox:
                raise SandboxBroken("The session ended the sandbox.") from None
            self._lose(f"The session is over: {error}.")
        except (msgspec.MsgspecError, UnicodeError):
            self._lose("The session was ended: the program wrote to the debugger's pipe.")
        else:
            return decoded
        return None

    def _lose(self, why: str) -> None:
        self.said += [self.session.printed() if self.session else "", why]
        self._end()

    def _show(self, answer: _Answer) -> None:
        printed = self.session.printed() if self.session else ""
        self.said += [printed, answer.output, answer.note, answer.context]
        self.breakpoints = answer.breakpoints[:_MOST_BREAKPOINTS]
        texts = {file: self._text(file) for file in {each.file for each in self.breakpoints}}
        self.texts = {file: text for file, text in texts.items() if text is not None}
        if answer.state == "ended":
            self._end()

    def _show_breakpoints(self) -> None:
        listed = "\n".join(f"  {name(str(each))}" for each in self.breakpoints)
        self.said.append(f"Breakpoints:\n{listed}" if listed else "")

    def _end(self) -> None:
        self.session = None
        self.life.close()


def _start(runner: str, file: str, last: _Start | None) -> _Start:
    """Return what to debug; without a file, the same as before.

    Raise ToolError if no file is named, its name is no name, or the runner is unknown.
    """
    if len(file) > _MOST_FILE_CHARS or "\0" in file:
        raise ToolError(f"file must have no NUL and at most {_MOST_FILE_CHARS} characters.")
    if not file.strip():
        if last is None:
            raise ToolError('Name the file to debug, for example file = "test.py::test_name".')
        return last
    try:
        words = shlex.split(file)
    except ValueError as error:
        raise ToolError(f"file cannot be read: {error}") from None
    is_test = "::" in words[0] or re.fullmatch(r"test.*|.*_test\.py", words[0].rpartition("/")[2])
    runner = runner or ("pytest" if is_test else "python")
    if runner not in ("python", "pytest"):
        raise ToolError(f'runner {runner[:50]!r} must be "python" or "pytest".')
    return _Start(runner, words)
