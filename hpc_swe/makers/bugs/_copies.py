"""Find the files of a sandbox that are copies of some texts, wherever they lie and whatever they are called.

The program is sent to the sandbox as text, with a call of `main` at its end, so it imports the standard
library only.
"""

import ast
import json
import os
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator

LARGEST = 4_000_000
SHORTEST_LINE = 20
WHOLE, FUNCTION = (4, 0.2), (3, 0.8)
"""A copy of a text, or of one function, has so many lines, and so large a share of its lines."""
NO_FILES = ("/proc", "/sys", "/dev")


def lines_of(data: bytes) -> set[bytes]:
    """Return the lines that are long enough to be told from lines of other files."""
    return {line for each in data.split(b"\n") if len(line := each.strip()) >= SHORTEST_LINE}


def parts_of(data: bytes) -> list[tuple[str, set[bytes], float]]:
    """Return the whole text, whose name is empty, and its functions: name, lines, and how many a copy has."""
    try:
        nodes = list(ast.walk(ast.parse(data)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of a later release than this interpreter
        nodes = []
    lines = re.split(rb"\n|\r(?!\n)", data)  # as a syntax tree counts them
    parts = [("", lines_of(data), WHOLE)]
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            own = b"\n".join(lines[node.lineno - 1 : node.end_lineno])
            parts.append((node.name, lines_of(own), FUNCTION))
    return [(name, own, max(fewest, share * len(own))) for name, own, (fewest, share) in parts]


def main(out: str, folder: str) -> None:
    """Search for the texts in `folder`, by label, and write to `out` what was found of each.

    `files` are the paths of its copies, and `functions` the names of those that stand in another file, too.
    """
    texts = {label: _read(os.path.join(folder, label)) for label in sorted(os.listdir(folder))}  # noqa: PTH118, PTH208
    parts = [(label, *part) for label, data in texts.items() for part in parts_of(data)]
    owners: dict[bytes, list[int]] = {}
    for number, (_, _, lines, _) in enumerate(parts):
        for line in lines:
            owners.setdefault(line, []).append(number)
    found = {label: {"files": set[str](), "functions": set[str]()} for label in texts}
    for path, data in _files(os.getcwd()):  # noqa: PTH109
        shared = Counter(number for line in lines_of(data) if line in owners for number in owners[line])
        hits = [parts[number][:2] for number, count in shared.items() if count >= parts[number][3]]
        copied = {label for label, name in hits if not name}
        for label, name in hits:
            if label in copied:
                found[label]["files"].add(path)
            else:
                found[label]["functions"].add(name)
    with open(out, "w") as file:  # noqa: PTH123
        json.dump(found, file, default=sorted)


def _files(work: str) -> Iterator[tuple[str, bytes]]:
    """Yield each file of text with its content; the files of an archive have the archive's path."""
    for folder, folders, names in os.walk("/"):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in (*NO_FILES, work)]  # noqa: PTH118
        for path in (os.path.join(folder, name) for name in names):  # noqa: PTH118
            data = _read(path)
            if data[:2] == b"PK":
                yield from ((path, each) for each in _packed(path))
            elif b"\0" not in data[:1000]:
                yield path, data


def _packed(path: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            for one in archive.infolist():
                if one.filename.endswith(".py") and one.file_size <= LARGEST:
                    yield archive.read(one)
    except (OSError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile):
        return  # no archive, or one that no import reads


def _read(path: str) -> bytes:
    try:
        found = os.lstat(path)  # noqa: PTH116
        if not stat.S_ISREG(found.st_mode):
            return b""
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read(2 if found.st_size > LARGEST else -1)  # an archive shows in two bytes
    except OSError:
        return b""
