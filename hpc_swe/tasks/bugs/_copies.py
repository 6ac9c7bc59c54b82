"""Find the files of a sandbox that are copies of some texts, wherever they lie and whatever they are called.

The program is sent to the sandbox as text, with a call of `main` at its end, so it imports the standard
library only.
"""

import json
import os
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator

LARGEST = 4_000_000
SHORTEST_LINE = 20
FEWEST, SHARE = 4, 0.2
NO_FILES = ("/proc", "/sys", "/dev")


def lines_of(data: bytes) -> set[bytes]:
    """Return the lines that are long enough to be told from lines of other files."""
    return {line for each in data.split(b"\n") if len(line := each.strip()) >= SHORTEST_LINE}


def main(out: str, folder: str) -> None:
    """Write label -> paths of the copies of each text in `folder` to the file `out`."""
    texts = {label: lines_of(_read(os.path.join(folder, label))) for label in sorted(os.listdir(folder))}  # noqa: PTH118, PTH208
    owners: dict[bytes, list[str]] = {}
    for label, lines in texts.items():
        for line in lines:
            owners.setdefault(line, []).append(label)
    found: dict[str, list[str]] = {label: [] for label in texts}
    for path, data in _files(os.getcwd()):  # noqa: PTH109
        shared = Counter(label for line in lines_of(data) if line in owners for label in owners[line])
        for label, count in shared.items():
            if count >= max(FEWEST, SHARE * len(texts[label])) and path not in found[label]:
                found[label].append(path)
    with open(out, "w") as file:  # noqa: PTH123
        json.dump(found, file)


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
