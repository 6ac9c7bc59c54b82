"""Bring the text of a patch into the one form that everything here reads."""

import re
from typing import Final

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_HEADER = re.compile(r"(diff --git|---|\+\+\+|(?:rename|copy) (?:from|to)) ")
_NOT_REVERSED = ("rename ", "copy ", "similarity ", "GIT binary", "Binary files")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"(?=\s|$)')
_DIGESTS = re.compile(r"^index [0-9a-f]{4,64}\.\.[0-9a-f]{4,64}(?: \d{6})?\r?\n", re.MULTILINE)
_ESCAPE = re.compile(rb"\\(?:([0-7]{3})|(.))")

HIDDEN: Final = "# Only the image holds the hidden tests.\n"
"""Stands for the test patch of a task until a grader has seen the image; see `Start.hidden`."""


def normalised(patch: str) -> str:
    """Return a patch that ends with a newline, with names that git has quoted only for letters unquoted.

    Git quotes a name with a byte outside of ASCII, unless ``core.quotePath`` is off. The lines of hunks stay,
    whatever they look like.
    """
    if not patch.strip():
        return patch
    lines = patch.split("\n")
    old = new = 0
    for number, line in enumerate(lines):
        if old > 0 or new > 0:
            old, new = old - (line[:1] in ("-", " ", "")), new - (line[:1] in ("+", " ", ""))
            if line[:1] == "\\":  # no newline at the end of the file
                continue
        elif hunk := _HUNK.match(line):
            old, new = int(hunk[1] or 1), int(hunk[2] or 1)
        elif '"' in line and (header := _HEADER.match(line)):
            lines[number] = _with_plain_names(line, header.end())
    return "\n".join(lines) + ("" if lines[-1] == "" else "\n")


def without_digests(patch: str) -> str:
    """Remove the digests of files from a patch, or from a script that holds one.

    The digest of a hidden test's file would tell a submission whether that file was changed since. Binary
    files keep theirs, since git needs them.
    """
    parts = re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE)
    return "".join(
        part if re.search(r"^GIT binary patch$", part, re.MULTILINE) else _DIGESTS.sub("", part)
        for part in parts
    )


def reversed_patch(patch: str) -> str:
    """Return the patch that undoes a patch; raise ValueError if it renames, copies or has binary parts."""
    made: list[str] = []
    old = new = 0
    for line in patch.split("\n"):
        if old > 0 or new > 0:
            old, new = old - (line[:1] in ("-", " ", "")), new - (line[:1] in ("+", " ", ""))
            made.append({"-": "+", "+": "-"}.get(line[:1], line[:1]) + line[1:])
        elif hunk := _HUNK.match(line):
            old, new = int(hunk[1] or 1), int(hunk[2] or 1)
            before, after = line.split(" ")[1:3]
            made.append(f"@@ -{after[1:]} +{before[1:]} @@{line[hunk.end() :]}")
        elif line.startswith(_NOT_REVERSED):
            raise ValueError(f"{line.split(' ')[0]}: such a patch cannot be reversed")
        elif not line.startswith("index "):
            made.append(_reversed_header(line, made))
    return "\n".join(made)


def _reversed_header(line: str, made: list[str]) -> str:
    """Return a header's line for the reversed patch; the two names of a file change places."""
    for one, other in (("new file", "deleted file"), ("old mode", "new mode")):
        for start, end in ((one, other), (other, one)):
            if line.startswith(f"{start} "):
                return end + line[len(start) :]
    if line.startswith("--- "):
        return "+++ " + _side(line[4:], "a/", "b/")
    if line.startswith("+++ ") and made:
        before = made.pop()
        made.append("--- " + _side(line[4:], "b/", "a/"))
        return before
    return line


def _side(name: str, old: str, new: str) -> str:
    return new + name[len(old) :] if name.startswith(old) else name


def _with_plain_names(line: str, start: int) -> str:
    """Return a header, whose first name begins at `start`, with the names unquoted that git has quoted."""
    first = _QUOTED.match(line, start)
    after = first.end() + 1 if first else line.find(' "', start) + 1
    second = _QUOTED.match(line, after) if after and line.startswith("diff ") else None
    for name in (second, first):
        if name and (name is first or name.end() == len(line.rstrip())):
            line = line[: name.start()] + _unquoted(name[0], name[1]) + line[name.end() :]
    return line


def _unquoted(quoted: str, inner: str) -> str:
    """Return a name as it is, or as git wrote it if it has more to quote than letters."""
    found = _ESCAPE.sub(_byte, inner.encode())
    try:
        name = found.decode()
    except UnicodeDecodeError:
        return quoted
    return name if name.isprintable() and '"' not in name and "\\" not in name else quoted


def _byte(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 8) & 255]) if escape[1] else escape[0]
