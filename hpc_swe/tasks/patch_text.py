"""Bring the text of a patch into the one form that everything here reads."""

import re

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_HEADER = re.compile(r"(diff --git|---|\+\+\+|(?:rename|copy) (?:from|to)) ")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"(?=\s|$)')
_ESCAPE = re.compile(rb"\\(?:([0-7]{3})|(.))")


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
