"""What an agent hands in: the difference between its task's files and what it left of them.

Made and applied outside the agent's sandbox, so nothing in there has a say in it. Of plain files it is made
on the host from whole contents, and `apply` demands that it fits exactly. Of a repository it is git's: what
the agent changed is laid into a second sandbox, which it has never seen, and compared there. Both are
unified diffs that people and git can read.
"""

import difflib
import json
import re
import secrets
from pathlib import PurePosixPath
from typing import NoReturn

import msgspec

from hpc_swe.errors import SandboxError, boundary
from hpc_swe.plugins.sandboxes.base import CommandResult, Sandbox, Sandboxes
from hpc_swe.records import Task

MOST_LINES = 10_000
"""Beyond this a file is replaced as a whole: comparing is quadratic, and the policy chooses the input."""
MOST_BYTES = 1_000_000
MOST_CHANGED = 2_000
"""Files of a repository that may differ; more are too large a change to hand in."""
MOST_READ = 50_000_000
"""Bytes of all of them, before git makes a difference of it."""
IGNORED = {"__pycache__", ".git", ".pytest_cache"}
ABSENT = "/dev/null"
NO_NEWLINE = "\\ No newline at end of file\n"
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@\n")
_STEP_S = 120.0
_PIECE = 400_000
_MOST_PIECES = 20
# Path -> [kind and mode, size or link, time of change], in pieces that a sandbox gives out. Only modules that
# the interpreter holds already: the agent may have put others in their place.
_LISTING = """
import json, os, stat
found = {}
for folder, folders, names in os.walk("."):
    links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
    folders[:] = [name for name in folders if name != ".git"]
    for name in names + links:
        path = os.path.join(folder, name)[2:]
        if not path.isprintable():
            continue
        state = os.lstat(path)
        if stat.S_ISLNK(state.st_mode):
            found[path] = ["link", os.readlink(path), 0]
        elif stat.S_ISREG(state.st_mode):
            kind = "executable" if state.st_mode & 0o100 else "file"
            found[path] = [kind, state.st_size, state.st_mtime_ns]
text = json.dumps(found)
for number in range(len(text) // PIECE + 1):
    with open(f"{NAME}.{number}", "w") as file:
        file.write(text[number * PIECE : (number + 1) * PIECE])
"""
# Paths are given up before others are made: a folder may have become a link, or a file a folder.
_CLEAR = """
import json, os
for path in json.load(open(NAME)):
    os.unlink(path)
    while (path := os.path.dirname(path)) and not os.listdir(path):
        os.rmdir(path)
"""
_FINISH = """
import json, os
for path, kind, target in json.load(open(NAME)):
    if kind == "link":
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        os.symlink(target, path)
    else:
        os.chmod(path, 0o755 if kind == "executable" else 0o644)
"""
Listing = dict[str, tuple[str, int | str, int]]
_listings = msgspec.json.Decoder(Listing)


class BadSubmission(ValueError):
    """The text is not a difference that fits the task's files."""


def take(task: Task, sandbox: Sandbox, sandboxes: Sandboxes) -> str:
    """The agent's changes; empty when there are none, or when they are too large to hand in.

    Raises:
        SandboxError: The host failed.
    """
    try:
        text = _from_git(task, sandbox, sandboxes) if task.base_commit else _from_files(task, sandbox)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError):
        return ""
    return text if len(text.encode()) <= MOST_BYTES else ""


def _from_git(task: Task, sandbox: Sandbox, sandboxes: Sandboxes) -> str:
    """All but what the base commit itself ignores: products of a build are no work of the agent's."""
    left = _listing(sandbox)
    with sandboxes.open(task) as clean:
        found = _untouched(task, clean)
        touched = [path for path, entry in left.items() if found.get(path) != entry]
        rewritten = [path for path in touched if not _is_same(path, left, sandbox, found, clean)]
        changed = _without_ignored(clean, found, rewritten)
        gone = [path for path in found if path not in left]
        if len(changed) + len(gone) > MOST_CHANGED:
            return ""
        contents = _contents(sandbox, {path: left[path] for path in changed})
        _run(clean, _CLEAR, [*gone, *(path for path in contents if path in found)])
        for path, data in contents.items():
            if left[path][0] != "link":
                clean.write(path, data)
        _run(clean, _FINISH, [(path, left[path][0], left[path][1]) for path in contents])
        return _compared(clean, gone, list(contents))


def _untouched(task: Task, clean: Sandbox) -> Listing:
    """What the image holds; no agent answers for what is wrong here."""
    looked = clean.run("git rev-parse --quiet --verify HEAD", _STEP_S)
    if looked.exit_code:
        raise SandboxError(
            f"image {task.image} holds no repository in {task.workdir}: {looked.output[-200:]}"
        )
    with boundary(SandboxError, f"list the files of image {task.image}"):
        return _listing(clean)


def _listing(sandbox: Sandbox) -> Listing:
    """Every file and link of a work directory.

    Raises:
        OSError: The sandbox broke, or holds too much.
    """
    name = f".{secrets.token_hex(16)}"
    result = sandbox.python(f"PIECE, NAME = {_PIECE}, {name!r}\n{_LISTING}", _STEP_S)
    if result.exit_code:
        raise OSError(f"cannot list the work directory: {result.output[-200:]}")
    text = ""
    for number in range(_MOST_PIECES):
        piece = sandbox.read(f"{name}.{number}").decode()
        text += piece
        if len(piece) < _PIECE:
            sandbox.run(f"rm -f {name}.*", _STEP_S)
            return _listings.decode(text)
    raise OSError("the work directory holds too many files")


def _is_same(path: str, left: Listing, sandbox: Sandbox, found: Listing, clean: Sandbox) -> bool:
    """Written anew with the bytes it had: formatters and `sed -i` do so to every file they look at."""
    if path not in found or left[path][:2] != found[path][:2]:
        return False
    try:
        return sandbox.read(path) == clean.read(path)
    except OSError:  # too large to be handed in
        return False


def _without_ignored(clean: Sandbox, found: Listing, paths: list[str]) -> list[str]:
    """Asked of the untouched sandbox: its rules are the base commit's. Tracked files are never ignored.

    Git refuses names like ``:(top)x`` unless they begin otherwise, and all that lies where it has a link.
    """
    links = {path for path, entry in found.items() if entry[0] == "link"}
    asked = [f"./{path}" for path in paths if not links.intersection(map(str, PurePosixPath(path).parents))]
    name = f".git/{secrets.token_hex(8)}"
    clean.write(name, "\0".join(asked).encode())
    result = _ours(clean.run(f"git check-ignore -z --stdin < {name} > {name}.ignored", _STEP_S))
    if result.exit_code not in (0, 1):
        raise OSError(f"git: {result.output[-500:]}")
    ignored = set(clean.read(f"{name}.ignored").decode().split("\0"))
    return [path for path in paths if f"./{path}" not in ignored and not IGNORED & set(path.split("/"))]


def _contents(sandbox: Sandbox, entries: Listing) -> dict[str, bytes]:
    """What a file too large to be handed in hides is lost, not the work beside it."""
    contents: dict[str, bytes] = {}
    total = 0
    for path, (kind, _, _) in entries.items():
        try:
            contents[path] = b"" if kind == "link" else sandbox.read(path)
        except OSError:
            continue
        total += len(contents[path])
        if total > MOST_READ:
            raise OSError(f"more than {MOST_READ} bytes were changed")
    return contents


def _compared(clean: Sandbox, gone: list[str], there: list[str]) -> str:
    """Byte for byte, whatever attributes the agent set; with a file that is not UTF-8, all goes in binary."""
    if not gone and not there:
        return ""
    name = f".git/{secrets.token_hex(8)}"
    attributes = "* -text -ident -filter -working-tree-encoding !diff"
    clean.write(f"{name}.gone", "\0".join(gone).encode())
    clean.write(f"{name}.there", "\0".join(there).encode())
    for more in ("", " -diff"):
        clean.write(".git/info/attributes", f"{attributes}{more}\n".encode())
        command = (
            f"git update-index --force-remove -z --stdin < {name}.gone && "
            f"git update-index --add --replace -z --stdin < {name}.there && "
            f"git diff --cached --binary --full-index --no-renames --no-ext-diff --no-color > {name}.patch"
        )
        result = _ours(clean.run(command, _STEP_S))
        if result.exit_code:
            raise OSError(f"git: {result.output[-500:]}")
        try:
            return clean.read(f"{name}.patch").decode()
        except UnicodeDecodeError:
            continue
    raise OSError("the difference is no text")


def _ours(result: CommandResult) -> CommandResult:
    """No policy runs in the untouched sandbox; a name that git refuses is one that it chose, all the same."""
    if result.timed_out or result.broke_sandbox:
        raise SandboxError(f"the sandbox that compares with the base commit failed: {result.output[-200:]}")
    return result


def _run(clean: Sandbox, program: str, argument: object) -> None:
    name = f".git/{secrets.token_hex(8)}"
    clean.write(name, json.dumps(argument).encode())
    result = _ours(clean.python(f"NAME = {name!r}\n{program}", _STEP_S))
    if result.exit_code:
        raise OSError(f"cannot lay out the changes: {result.output[-500:]}")


def _from_files(task: Task, sandbox: Sandbox) -> str:
    present = {path for path in sandbox.paths() if path.isprintable() and not IGNORED & set(path.split("/"))}
    text = ""
    for path in sorted(present | task.files.keys()):
        try:
            new = sandbox.read(path).decode() if path in present else None
        except (OSError, UnicodeDecodeError):
            continue  # not text, or too large: no part of the work
        text += difference(path, task.files.get(path), new)
    return text


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
