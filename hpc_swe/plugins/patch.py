"""What an agent hands in: the difference between its task's files and what it left of them.

Made and applied outside the agent's sandbox, so nothing in there has a say in it. Of plain files it is made
on the host from whole contents, and `apply` demands that it fits exactly. Of a repository it is git's: what
the agent changed is laid into a second sandbox, which it has never seen, and compared there. Both are
unified diffs that people and git can read.
"""

import difflib
import logging
import re
from typing import NoReturn

from hpc_swe.plugins import _repository
from hpc_swe.plugins._repository import IGNORED, MOST_READ, TooMuch
from hpc_swe.plugins.sandboxes.base import Sandbox, Sandboxes
from hpc_swe.records import Task

log = logging.getLogger(__name__)

MOST_LINES = 10_000
"""Beyond this a file is replaced as a whole: comparing is quadratic, and the policy chooses the input."""
MOST_BYTES = 1_000_000
ABSENT = "/dev/null"
NO_NEWLINE = "\\ No newline at end of file\n"
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@\n")


class BadSubmission(ValueError):
    """The text is not a difference that fits the task's files."""


def take(task: Task, sandbox: Sandbox, sandboxes: Sandboxes) -> str:
    """The agent's changes; empty when there are none, or when they are too large to hand in.

    Raises:
        SandboxError: The host failed.
    """
    try:
        if not task.base_commit:
            return _from_files(task, sandbox)
        with sandboxes.open(task) as clean:
            text = _repository.difference(task, sandbox, clean)
    except OSError as error:
        log.info("nothing handed in for %s: %s", task.task_id, error)
        return ""
    return text if len(text.encode()) <= MOST_BYTES else ""


def _from_files(task: Task, sandbox: Sandbox) -> str:
    """Stops reading as soon as it is too large: the agent chooses how many files there are, and how long."""
    present = {path for path in sandbox.paths() if path.isprintable() and not IGNORED & set(path.split("/"))}
    parts: list[str] = []
    read = made = 0
    for path in sorted(present | task.files.keys()):
        try:
            data = sandbox.read(path) if path in present else None
        except OSError:
            continue  # too large: no part of the work
        read += len(data or b"")
        try:
            new = data if data is None else data.decode()
        except UnicodeDecodeError:
            new = task.files.get(path)  # not text: no part of it either
        lines = (new or "").count("\n")
        if lines > MOST_LINES and len(new or "") + lines > MOST_BYTES and new != task.files.get(path):
            raise TooMuch(f"{path} has {lines} lines")
        parts.append(difference(path, task.files.get(path), new))
        made += len(parts[-1].encode())
        if read > MOST_READ or made > MOST_BYTES:
            raise TooMuch(f"more than {MOST_READ} bytes were left, or {MOST_BYTES} of changes")
    return "".join(parts)


def apply(task: Task, submission: str) -> dict[str, str]:
    """The task's files with the changes made: path -> text.

    Raises:
        BadSubmission: It does not fit the task's files, or leads out of the work directory.
    """
    files = dict(task.files)
    lines = _lines(submission)
    position = 0
    while position < len(lines):
        old_path, new_path = _header(lines, position)
        path = new_path or old_path or _refuse(f"line {position + 1} names no file")
        if old_path is not None and old_path not in task.files:
            _refuse(f"{old_path} is no file of the task")
        text, position = _patched(_lines(files.get(path, "")), lines, position + 2)
        if new_path is None:
            files.pop(path, None)
        else:
            files[path] = text
    return files


def difference(path: str, old: str | None, new: str | None) -> str:
    """One file's part of a submission; None is no file."""
    if old == new:
        return ""
    before, after = _lines(old or ""), _lines(new or "")
    header = f"--- {ABSENT if old is None else f'a/{path}'}\n+++ {ABSENT if new is None else f'b/{path}'}\n"
    if len(before) + len(after) > MOST_LINES:
        starts = int(bool(before)), int(bool(after))
        body = [f"@@ -{starts[0]},{len(before)} +{starts[1]},{len(after)} @@\n"]
        body += [f"-{line}" for line in before] + [f"+{line}" for line in after]
    else:
        body = list(difflib.unified_diff(before, after))[2:]
    return header + "".join(line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}" for line in body)


def _header(lines: list[str], position: int) -> tuple[str | None, str | None]:
    def path(number: int, mark: str, side: str) -> str | None:
        line = lines[number] if number < len(lines) else ""
        if line == f"{mark} {ABSENT}\n":
            return None
        name = line.removeprefix(f"{mark} {side}/").removesuffix("\n")
        if not line.startswith(f"{mark} {side}/") or {"", ".", ".."} & set(name.split("/")):
            _refuse(f"line {number + 1}: {line[:100]!r} names no file below the work directory")
        return name

    old, new = path(position, "---", "a"), path(position + 1, "+++", "b")
    if None not in (old, new) and old != new:
        _refuse(f"line {position + 1} renames a file")
    return old, new


def _patched(old: list[str], lines: list[str], position: int) -> tuple[str, int]:
    """The file after all hunks that follow, and where the next header is."""
    new: list[str] = []
    done = 0
    while position < len(lines) and (hunk := _HUNK.fullmatch(lines[position])):
        start, count = int(hunk[1]), int(hunk[2] or 1)
        first = start - 1 if count else start
        body, position = _hunk_body(lines, position + 1, count, int(hunk[4] or 1))
        removed = [text for mark, text in body if mark != "+"]
        if first < done or old[first : first + count] != removed:
            _refuse(f"the hunk at line {position} does not fit")
        new += old[done:first] + [text for mark, text in body if mark != "-"]
        done = first + count
    return "".join(new + old[done:]), position


def _hunk_body(lines: list[str], position: int, old: int, new: int) -> tuple[list[tuple[str, str]], int]:
    body: list[tuple[str, str]] = []
    while old or new or lines[position : position + 1] == [NO_NEWLINE]:
        line = lines[position] if position < len(lines) else ""
        if line == NO_NEWLINE and body:
            body[-1] = (body[-1][0], body[-1][1].removesuffix("\n"))
        elif line[:1] in ("-", "+", " ") and line:
            old, new = old - (line[0] != "+"), new - (line[0] != "-")
            body.append((line[0], line[1:]))
        if min(old, new) < 0 or line[:1] not in ("-", "+", " ", "\\") or not line:
            _refuse(f"line {position + 1} is no part of a hunk")
        position += 1
    return body, position


def _lines(text: str) -> list[str]:
    *lines, last = text.split("\n")
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def _refuse(why: str) -> NoReturn:
    raise BadSubmission(f"submission: {why}")
