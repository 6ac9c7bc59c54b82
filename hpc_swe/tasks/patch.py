"""Make and apply patches: the unified diffs that agents hand in.

A patch is the difference between a task's files and the files that the agent left. It is made and applied
outside the agent's sandbox, so nothing in there can influence it. For plain files, the host compares whole
contents, and `apply` requires an exact fit. For a repository, git makes it: the agent's changes are copied
into a second sandbox, which the agent has never seen, and compared there. People and git can read both.
"""

import difflib
import logging
import re
from typing import NoReturn

from hpc_swe.agents.sandboxes.base import Sandbox, Sandboxes
from hpc_swe.base.records import Task
from hpc_swe.tasks import _repository
from hpc_swe.tasks._repository import IGNORED, MOST_READ
from hpc_swe.tasks.patch_text import normalised

log = logging.getLogger(__name__)

MOST_LINES = 10_000
"""Longer files are replaced as a whole: a diff takes quadratic time, and the policy chooses the input."""
MOST_BYTES = 1_000_000
"""Size of the largest patch that is handed in."""
ABSENT = "/dev/null"
NO_NEWLINE = "\\ No newline at end of file\n"
_ENCODING = re.compile(
    rb"([ \t\f]*#.*?coding[:=][ \t]*)"
    rb"(latin-?1|(?:iso-?|iso_)8859-\d+|(?:cp|windows-)125\d|koi8-[ru]|gbk|gb2312|gb18030|big5|shift_jis|euc-(?:jp|kr))"
    rb"(?![-\w.])",
    re.IGNORECASE,
)
"""How a Python file declares its encoding; codecs that take long for chosen bytes are left out."""
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@\n")


class BadPatch(ValueError):
    """The text is not a patch that fits the task's files."""


def take(task: Task, sandbox: Sandbox, sandboxes: Sandboxes) -> str:
    """Return the agent's patch; it is empty if there are no changes, or if they are too large to hand in.

    Raise SandboxError if the host failed.
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
    """Return the patch of plain files; stop reading at a limit, since the agent chooses number and sizes."""
    present = {path for path in sandbox.paths() if path.isprintable() and not IGNORED & set(path.split("/"))}
    parts: list[str] = []
    read = made = 0
    for path in sorted(present | task.files.keys()):
        try:
            data = sandbox.read(path) if path in present else None
        except OSError:
            continue  # too large to be part of the patch
        read += len(data or b"")
        try:
            new = data if data is None else _text(path, data)
        except UnicodeDecodeError:
            new = task.files.get(path)  # not text, so not part of it either
        lines = (new or "").count("\n")
        if lines > MOST_LINES and len(new or "") + lines > MOST_BYTES and new != task.files.get(path):
            raise OSError(f"{path} has {lines} lines")
        parts.append(difference(path, task.files.get(path), new))
        made += len(parts[-1].encode())
        if read > MOST_READ or made > MOST_BYTES:
            raise OSError(f"more than {MOST_READ} bytes were left, or {MOST_BYTES} of changes")
    return "".join(parts)


def _text(path: str, data: bytes) -> str:
    """Decode a file; a Python file that declares a usual encoding becomes the same program in UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        lines = data.split(b"\n", 2)[:2] if path.endswith(".py") else []
        for line in lines:
            if declared := _ENCODING.match(line):
                head = data.index(line) + declared.end(1)
                encoding = declared[2].decode()
                return f"{data[:head].decode(encoding)}utf-8{data[head + len(encoding) :].decode(encoding)}"
            if line.strip() and not line.lstrip().startswith(b"#"):
                break
        raise


def apply(task: Task, patch: str) -> dict[str, str]:
    """Apply a patch to the task's files and return them: path -> text.

    Raise BadPatch if it does not fit the files, or names a file outside the work directory.
    """
    files = dict(task.files)
    lines = _lines(normalised(patch))
    position = 0
    while position < len(lines):
        old_path, new_path = _header(lines, position)
        path = new_path or old_path or _refuse(f"line {position + 1} names no file")
        if old_path is not None and old_path not in task.files:
            _refuse(f"{old_path} is not a file of the task")
        text, position = _apply_hunks(_lines(files.get(path, "")), lines, position + 2)
        if new_path is None:
            files.pop(path, None)
        else:
            files[path] = text
    return files


def difference(path: str, old: str | None, new: str | None) -> str:
    """Return one file's part of a patch; None stands for a file that does not exist."""
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


def _apply_hunks(old: list[str], lines: list[str], position: int) -> tuple[str, int]:
    """Apply all hunks of one file; return its new text and the position of the next header."""
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
            _refuse(f"line {position + 1} is not part of a hunk")
        position += 1
    return body, position


def _lines(text: str) -> list[str]:
    *lines, last = text.split("\n")
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def _refuse(why: str) -> NoReturn:
    raise BadPatch(f"patch: {why}")
