"""Whether an image shows its task's solution to who looks about: in an installed copy, or another clone.

Searched is every file of the image that is not, unchanged, one of the base commit. A copy is known by lines
that the reference adds and the base commit has nowhere: three of one file anywhere; or, where the reference
adds fewer, all of them in a file of the same name and folder, as an installed package has it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from hpc_swe.plugins.tasksets._swebench_rows import added
from jobs.images.commands import git, run
from jobs.images.repository import unchanged

_LEAST = 16
"""Characters of a line that is told from others; shorter ones are everywhere."""
_ENOUGH = 3
_MOST = 12
_LARGEST = 4_000_000


@dataclass(frozen=True)
class Gold:
    """Lines that tell the solution of one file."""

    place: str
    """The end of its path: folder and name."""
    lines: list[bytes]

    def is_in(self, path: str, data: bytes) -> bool:
        """Whether a file of the image is a copy."""
        enough = min(_ENOUGH, len(self.lines))
        if enough < _ENOUGH and not f"/{path}".endswith(f"/{self.place}"):
            return False
        return sum(line in data for line in self.lines) >= enough


def search(tree: Path, workdir: str, commit: str, reference: str) -> list[str]:
    """Paths below `tree` that show the solution, or another repository that holds the base commit."""
    repository = tree / workdir.lstrip("/")
    gold = _gold(repository, commit, reference)
    known = unchanged(repository, commit)
    suffixes = {Path(one.place).suffix for one in gold} | {".patch", ".diff", ".orig", ".rej"}
    found = []
    for folder, folders, names in os.walk(tree):
        here = Path(folder)
        if here == repository:
            folders.remove(".git")
        if {"HEAD", "objects", "refs"} <= {*folders, *names} and _holds(here, commit):
            found.append(str(here.relative_to(tree)))
        for name in names:
            path = here / name
            if Path(name).suffix not in suffixes or not _is_searched(path):
                continue
            if here.is_relative_to(repository) and str(path.relative_to(repository)) in known:
                continue
            data = path.read_bytes()
            if any(one.is_in(str(path.relative_to(tree)), data) for one in gold):
                found.append(str(path.relative_to(tree)))
    return sorted(found)


def _gold(repository: Path, commit: str, reference: str) -> list[Gold]:
    stripped = {path: [line.strip() for line in lines] for path, lines in added(reference)}
    worth = {path: [line for line in lines if len(line) >= _LEAST] for path, lines in stripped.items()}
    patterns = "\n".join(dict.fromkeys(line for lines in worth.values() for line in lines))
    if not patterns:
        return []
    looking = ("grep", "-h", "-I", "--fixed-strings", "-f", "-", commit, "--")
    hits = run(*git(repository), *looking, ok=(0, 1), stdin=patterns).splitlines()
    found = []
    for path, lines in worth.items():
        own = [line for line in lines if not any(line in hit for hit in hits)]
        longest = sorted(own, key=len, reverse=True)[:_MOST]
        if longest:
            place = "/".join(path.split("/")[-2:])
            found.append(Gold(place, [line.encode() for line in longest]))
    return found


def _is_searched(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size <= _LARGEST


def _holds(folder: Path, commit: str) -> bool:
    """Whether a folder that looks like a repository's inside is one, and has the commit."""
    asked = ("git", "-c", "safe.directory=*", "--git-dir", str(folder), "cat-file", "-t", commit)
    return run(*asked, ok=(0, 1, 128)).strip() == "commit"
