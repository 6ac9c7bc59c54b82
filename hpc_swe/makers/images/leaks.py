"""Find the files of an image that show its task's solution or hidden tests.

The search covers every file of the image but unchanged ones of the base commit, with everything packed in it
(`contents`). A copy has lines that the reference or the tests add and that the base commit has nowhere,
compared by their letters and digits: three of one file anywhere; or, where fewer are added, all of them in a
file of that name and folder, or beside that path, as in a patch. The whole solved file is a copy too; byte
for byte where it is binary or has the same letters as before. A compiled file is a copy by the size of its
source, or by code, names and strings that only the solved file has.
"""

import ast
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path
from types import CodeType

from hpc_swe.base.errors import HpcSweError
from hpc_swe.base.records import Task
from hpc_swe.base.syntax import parse
from hpc_swe.makers.images.commands import git, run
from hpc_swe.makers.images.contents import LARGEST, contents, uncoloured, words_only
from hpc_swe.makers.images.repository import unchanged
from hpc_swe.tasks.swebench_rows import added

_MIN_LINE = 16
"""Characters of the shortest line that is compared; shorter ones occur everywhere."""
_MIN_WORD = 6
_MIN_FILE = 32
"""Letters and digits of the smallest file that is compared as a whole."""
_ENOUGH = 3
"""Lines or names of one file that show a copy."""
_ENOUGH_SIGNS = 60
"""Letters and digits that those lines have together."""
_MAX_LINES = 12
"""Lines of a file that are compared, the longest ones."""


@dataclass(frozen=True)
class Gold:
    """Hold the features of one file of the solution or of the tests."""

    path: str
    lines: list[bytes]
    """Letters and digits of lines that the base commit does not have."""
    before: bytes
    after: bytes
    """The whole file; empty where the patch does not apply."""
    signs: bytes
    """Letters and digits of the whole file."""
    is_marks_only: bool
    """The file before has the same letters and digits."""
    words: list[bytes]
    """Names and strings that a compiled file would hold, and the base commit does not."""
    codes: list[bytes]
    """Instructions of the solved functions, for compiled files of this interpreter's release."""

    def is_in(self, path: str, data: bytes, signs: bytes) -> bool:
        """Return whether a file of the image is a copy; `signs` are its letters and digits."""
        if self._is_whole(data, signs):
            return True
        if data[2:4] == b"\r\n":
            return self._is_compiled(path, data)
        found = [line for line in self.lines if line in signs]
        if len(found) >= _ENOUGH and sum(map(len, found)) >= _ENOUGH_SIGNS:
            return True
        is_whole = bool(found) and len(found) >= min(_ENOUGH, len(self.lines))
        return is_whole and (self._is_place(path) or self.path.encode() in data)

    def _is_whole(self, data: bytes, signs: bytes) -> bool:
        """Return whether it is the whole solved file; byte for byte if it is binary or only marks changed."""
        if len(self.signs) < _MIN_FILE:
            return False
        if self.is_marks_only:
            return data == self.after != self.before
        # The few letters of a table of bytes are also those of another.
        return self.after in data if b"\0" in self.after else self.signs in signs

    def _is_compiled(self, path: str, data: bytes) -> bool:
        found = [word for word in self.words if word in data]
        if not self._is_place(path):
            return len(found) >= _ENOUGH
        if self.after != self.before and source_hash(self.after) == data[8:16]:
            return True
        size = len(self.after).to_bytes(4, "little")
        if len(self.after) != len(self.before) and size in (data[12:16], data[8:12]):
            return True
        by_code = data.startswith(MAGIC_NUMBER) and any(code in data for code in self.codes)
        return by_code or bool(found) and len(found) >= min(_ENOUGH, len(self.words))

    def _is_place(self, path: str) -> bool:
        """Return whether a path ends in the folder and name, with anything around the name's stem."""
        *folders, name = [part for part in re.split(r"[/!]", path) if part not in ("__pycache__", "")]
        *wanted, own = self.path.split("/")
        if wanted[-1:] != folders[-1:] and wanted:
            return False
        return bool(re.fullmatch(rf"\W*{re.escape(own.partition('.')[0])}(\W.*)?", name))


def search(
    tree: Path,
    workdir: str,
    commit: str,
    *patches: str,
    started: Sequence[tuple[Task, Sequence[str]]] = (),
) -> list[str]:
    """List the paths below `tree` that show what a patch adds, and other repositories with the commit.

    `started` are tasks with a start, and patches of what it leaves. What it takes away must not be elsewhere
    either, such as in an installed copy. Raise HpcSweError if a start does not fit the commit.
    """
    repository = tree / workdir.lstrip("/")
    commit = run(*git(repository), "rev-parse", "--verify", commit).strip()
    golds = list(_golds(repository, commit, patches))
    hidden: set[str] = set()
    for task, own in started:
        golds += _of_start(repository, commit, task, own)
        hidden |= {f"{tree}{path}" for path in task.start.hidden} if task.start else set()
    is_cleaned = bool(started) and not patches  # a start removes what the repository has compiled
    known = {str(repository / name) for name in unchanged(repository, commit)}
    found = []
    for folder, folders, names in os.walk(tree):
        here = Path(folder)
        if here == repository:
            folders.remove(".git")
        if is_cleaned and here.is_relative_to(repository):
            folders[:] = [name for name in folders if name != "__pycache__"]
        folders[:] = [name for name in folders if f"{folder}/{name}" not in hidden]
        if {"HEAD", "objects", "refs"} <= {*folders, *names}:  # it looks like a git directory
            asked = ("git", "-c", "safe.directory=*", "--git-dir", folder, "cat-file", "-t", commit)
            if run(*asked, ok=(0, 1, 128)).strip() == "commit":
                found.append(str(here.relative_to(tree)))
        files = [here / name for name in names if f"{folder}/{name}" not in known]
        found += [shown for file in files if (shown := _shown(file, str(file.relative_to(tree)), golds))]
    return sorted(found)


def _shown(file: Path, path: str, golds: list[Gold]) -> str:
    """Return the path of the solution in a file or in what is packed in it; empty when there is none."""
    if file.is_symlink() or not file.is_file():
        return ""
    with file.open("rb") as opened:
        whole = opened.read(LARGEST)
    if _is_of_its_source(file, whole):
        return ""
    for inner, data in contents(path, whole):
        signs = words_only(uncoloured(data))
        if any(gold.is_in(inner, data, signs) for gold in golds):
            return inner
    return ""


def _is_of_its_source(file: Path, data: bytes) -> bool:
    """Return whether a file is compiled from the source beside it, which is searched itself.

    The names of a library's interface that a solution uses occur in the library's compiled files, too.
    """
    source = file.parent.parent / f"{file.name.partition('.')[0]}.py"
    if file.suffix != ".pyc" or file.parent.name != "__pycache__" or not source.is_file():
        return False
    if int.from_bytes(data[4:8], "little") & 1:  # the header has a hash of the source
        return source_hash(source.read_bytes()) == data[8:16]
    about = source.stat()
    of_source = (int(about.st_mtime) & 0xFFFFFFFF, about.st_size & 0xFFFFFFFF)
    return of_source == (int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little"))


def _of_start(repository: Path, commit: str, task: Task, patches: Sequence[str]) -> list[Gold]:
    """Return the features of what a start takes away, and of what patches add to what it leaves."""
    assert task.start
    with _scratch(repository) as (_, settings):
        here = partial(run, *git(repository), settings=settings)
        here("read-tree", commit)
        try:
            if task.start.patch:
                here("apply", "--cached", "--whitespace=nowarn", "-", stdin=task.start.patch)
        except HpcSweError as error:
            said = " ".join(str(error).rpartition(": exit code 1: ")[2].split())
            why = f"its start does not fit the image's commit ({said}): leave the instance out"
            raise HpcSweError(f"{task.task_id}: {why}") from None
        here("update-index", "--force-remove", "--", *task.start.inside)
        left = here("write-tree").strip()
        taken = here("diff", "--no-color", "--no-ext-diff", "--no-renames", left, commit)
        return list(_golds(repository, left, [taken, *patches], settings["GIT_OBJECT_DIRECTORY"]))


def _golds(repository: Path, base: str, patches: Sequence[str], more: str = "") -> Iterator[Gold]:
    """Yield the features of each file that patches of `base`, a commit or tree, change; see `_scratch`."""
    with _scratch(repository, more) as (_, settings):
        words = ("grep", "-h", "-I", "-e", "", base)
        shown = run(*git(repository), *words, ok=(0, 1), settings=settings).encode()
    signs = words_only(shown)
    for patch in patches:
        versions = _versions(repository, base, patch, more)
        for path, lines in added(patch):
            own = {words_only(line.strip().encode()) for line in lines if len(line.strip()) >= _MIN_LINE}
            telling = [line for line in own if len(line) >= _MIN_LINE // 2 and line not in signs]
            longest = sorted(telling, key=lambda line: (-len(line), line))[:_MAX_LINES]
            before, after = versions.get(path, (b"", b""))
            words_of = [word for word in _words(after) - _words(before) if word not in shown]
            own_signs, is_same = words_only(after), words_only(after) == words_only(before)
            codes = list(_codes(after) - _codes(before))
            yield Gold(path, longest, before, after, own_signs, is_same, words_of, codes)


@contextmanager
def _scratch(repository: Path, more: str = "") -> Iterator[tuple[Path, dict[str, str]]]:
    """Give git a separate index and folder of objects: nothing may get into the repository.

    `more` is a folder of further objects that git sees.
    """
    with tempfile.TemporaryDirectory(prefix="hpc_swe-") as scratch:
        objects = Path(scratch, "objects")
        objects.mkdir()
        inside = run(*git(repository), "rev-parse", "--absolute-git-dir").strip()
        yield (
            Path(scratch),
            {
                "GIT_INDEX_FILE": str(Path(scratch, "index")),
                "GIT_OBJECT_DIRECTORY": str(objects),
                "GIT_ALTERNATE_OBJECT_DIRECTORIES": ":".join(filter(None, [f"{inside}/objects", more])),
            },
        )


def _versions(repository: Path, commit: str, patch: str, more: str) -> dict[str, tuple[bytes, bytes]]:
    """Return the files that a patch changes, before and after it; nothing when it does not apply."""
    with _scratch(repository, more) as (scratch, settings):
        here = partial(run, *git(repository), ok=(0, 1, 128), settings=settings)
        here("read-tree", commit)
        here("apply", "--cached", "--whitespace=nowarn", "-", stdin=patch)
        names = here("diff", "--cached", "--name-only", "-z", "--no-renames", commit)
        here("checkout-index", f"--prefix={scratch}/after/", "-z", "--stdin", stdin=names)
        here("read-tree", commit)
        here("checkout-index", f"--prefix={scratch}/before/", "-z", "--stdin", stdin=names)
        found = {}
        for name in names.split("\0"):
            before, after = Path(scratch, "before", name), Path(scratch, "after", name)
            if after.is_file():
                found[name] = before.read_bytes() if before.is_file() else b"", after.read_bytes()
        return found


def _words(source: bytes) -> set[bytes]:
    """Return the names and strings of a program; nothing when this Python cannot parse it."""
    found: set[str] = set()
    for node in ast.walk(_tree(source)):
        names = (getattr(node, name, None) for name in ("id", "attr", "name", "arg", "value"))
        found |= {name for name in names if isinstance(name, str)}
    return {word.encode(errors="replace") for word in found if len(word) >= _MIN_WORD}


def _tree(source: bytes) -> ast.Module:
    try:
        return parse(source)
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _codes(source: bytes) -> set[bytes]:
    todo: list[CodeType] = [compile(_tree(source), "", "exec", dont_inherit=True)]
    for code in todo:  # the loop extends the list
        todo += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return {code.co_code for code in todo}
