"""Find commits of a git history that change code and tests, and split each one into both parts.

The code part becomes the reference of a task, the test part its hidden tests. Two kinds of files are in
neither part: those that set up the test runner, since a reference that changes them would allow every agent
to do so, and binary files outside the tests. A trial of the tests shows later whether the rest suffices.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from hpc_swe.base.errors import ConfigError, DeadlineError, boundary
from hpc_swe.cluster.processes import completed
from hpc_swe.makers.images.commands import git
from hpc_swe.makers.images.contents import words_only
from hpc_swe.tasks import task_checks
from hpc_swe.tasks.patch_text import without_digests
from hpc_swe.tasks.swebench_rows import SET_UP, TESTS

FEWEST_WORDS = 3
"""Words that a description must have."""
Refusal = Literal["merge", "first", "no_code", "no_tests", "binary", "unreadable", "says_nothing"]
REFUSALS: dict[Refusal, str] = {
    "merge": "it has several parents, and its changes are those of other commits",
    "first": "nothing is before it",
    "no_code": "it changes no Python file but tests and the set-up of tests",
    "no_tests": "it changes no module of tests, or only removes some",
    "binary": "its tests come with binary files, which a patch of text cannot hold",
    "unreadable": "it changes a submodule, or text that is not UTF-8",
    "says_nothing": f"its message has fewer than {FEWEST_WORDS} words that are no pointer",
}
"""Reasons why a commit is no candidate."""

_LOG_S = 3600.0  # longest wait for one command; the log of a large repository takes minutes
_PATHS_AT_ONCE = 200
"""Paths on one command line: a path has at most 4,096 bytes, and a command line at least a million."""
_FEWEST_SIGNS = 8
"""Letters and digits of a line that may be a copy of a line of the patch."""
_LOG = ("log", "-z", "--no-renames", "--no-show-signature", "--numstat", "--no-textconv", "--no-ext-diff")
_FORMAT = "--format=%x01%H%x00%P%x00%cI%x00%B%x00"
_DIFF = (
    "--no-renames",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--full-index",
    "--unified=3",
    "--submodule=short",
)
_PREFIXES = ("--src-prefix=a/", "--dst-prefix=b/")
_TRAILER = re.compile(r"(?:[A-Z]\w*(?:-\w+)+|Fixes|Closes|Refs|Bug|Link|Cc): .*|\(cherry picked from .*\)")
_POINTER = re.compile(
    r" ?(?:"
    r"\w+://\S+"
    r"|\(?(?:\b(?:fix|close|resolve)(?:e?[sd])?:?\s+)?(?:[\w.-]+/[\w.-]+)?#\d+\b\)?"
    r"|\b(?:gh|bpo|pr)-\d+\b"
    r"|\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,64}\b"
    r"):?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Commit:
    """Describe a commit: its message, its parents, and the files that it changes."""

    sha: str
    parents: tuple[str, ...]
    date: str
    message: str
    paths: tuple[str, ...]
    binary: frozenset[str]

    @property
    def subject(self) -> str:
        """Return the first line of the message."""
        return self.message.strip().partition("\n")[0]


@dataclass(frozen=True)
class Parts:
    """Divide the files of a commit into tests and code; some are neither."""

    tests: tuple[str, ...]
    code: tuple[str, ...]


@dataclass(frozen=True)
class Candidate:
    """A candidate is a commit whose code part may be a reference, and whose test part its hidden tests."""

    commit: Commit
    patch: str
    test_patch: str
    modules: tuple[str, ...]
    """Modules of tests that the test part changes or adds."""
    statement: str
    """What the agent is told."""

    @property
    def base(self) -> str:
        """Return the commit that the agent starts from."""
        return self.commit.parents[0]


class RefusedCommit(Exception):
    """A commit is no candidate; `why` says which rule refused it."""

    def __init__(self, why: Refusal) -> None:
        super().__init__(REFUSALS[why])
        self.why = why


def commits(repository: Path, since: str = "") -> list[Commit]:
    """Return the commits that HEAD contains, the newest first.

    Raise ConfigError if the folder is not that of a git repository, or if git fails.
    """
    inside = _git(repository, "rev-parse", "--show-prefix").decode(errors="replace").strip()
    if inside:
        raise ConfigError(f"{repository} is the folder {inside} of a repository; name the repository itself")
    dates = [f"--since={since}"] if since else []
    text = _git(repository, *_LOG, _FORMAT, *dates, "HEAD").decode(errors="replace")
    return [_commit(record) for record in re.split(r"\x01(?=[0-9a-f]{40,64}\0)", text)[1:]]


def _commit(record: str) -> Commit:
    sha, parents, date, message, *files = record.split("\0")
    found = [re.fullmatch(r"\n?(\d+|-)\t(?:\d+|-)\t(.+)", line, re.DOTALL) for line in files]
    counts = [(match[2], match[1]) for match in found if match]
    binary = frozenset(path for path, count in counts if count == "-")
    return Commit(sha, tuple(parents.split()), date, message, tuple(path for path, _ in counts), binary)


def split(commit: Commit, tests: Sequence[str] = TESTS) -> Parts:
    """Sort the files of a commit into tests and code; the tests' patterns match whole paths.

    Raise RefusedCommit if the commit cannot become a task.
    """
    if len(commit.parents) != 1:
        raise RefusedCommit("merge" if commit.parents else "first")
    own = tuple(path for path in commit.paths if _matches(path, tests))
    set_up = [pattern for name in SET_UP for pattern in (name, f"*/{name}")]
    others = [path for path in commit.paths if path not in {*own, *commit.binary}]
    code = tuple(path for path in others if not _matches(path, set_up))
    if not any(path.endswith(".py") for path in code):
        raise RefusedCommit("no_code")
    if not any(map(is_module, own)):
        raise RefusedCommit("no_tests")
    if commit.binary.intersection(own):
        raise RefusedCommit("binary")
    return Parts(own, code)


def is_module(path: str) -> bool:
    """Return whether pytest finds tests in a file of this name.

    Example:
        >>> [is_module(path) for path in ("tests/test_a.py", "tests/conftest.py", "tests/data.txt")]
        [True, False, False]
    """
    name = PurePosixPath(path)
    return name.suffix == ".py" and (name.stem.startswith("test") or name.stem.endswith(("_test", "_tests")))


def candidate(repository: Path, commit: Commit, parts: Parts, text: str = "") -> Candidate:
    """Read both patches of a commit; `text` describes the task instead of the message.

    Raise RefusedCommit if the commit cannot become a task, and ConfigError if git fails.
    """
    patch, test_patch = (_patch(repository, commit, paths) for paths in (parts.code, parts.tests))
    removed = set(re.findall(r"^diff --git a/(.+) b/\1\ndeleted file mode", test_patch, re.MULTILINE))
    modules = tuple(path for path in parts.tests if is_module(path) and path not in removed)
    if not modules:
        raise RefusedCommit("no_tests")
    problem = text or statement(commit.message, patch)
    if len(re.findall(r"[^\W\d_]{2,}", problem)) < FEWEST_WORDS:
        raise RefusedCommit("says_nothing")
    return Candidate(commit, patch, without_digests(test_patch), modules, problem)


def statement(message: str, patch: str) -> str:
    """Return a commit's message without what points to the solution or repeats it.

    Left out are trailers, addresses, numbers of issues, ids of commits, and lines that the patch adds. What
    the message says about the solution in its own words stays.
    """
    added = {words_only(line[1:].encode()) for line in patch.split("\n") if line.startswith("+")}
    lines = message.strip().split("\n")
    while lines and (not lines[-1].strip() or (len(lines) > 1 and _TRAILER.fullmatch(lines[-1].strip()))):
        del lines[-1]
    signs = [words_only(line.encode()) for line in lines]
    kept = [
        line for line, own in zip(lines, signs, strict=True) if len(own) < _FEWEST_SIGNS or own not in added
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(_POINTER.sub("", line).rstrip() for line in kept)).strip()


def _patch(repository: Path, commit: Commit, paths: Sequence[str]) -> str:
    """Return the patch of some files, whose order is that of the log."""
    words = ("--literal-pathspecs", "diff", *_DIFF, *_PREFIXES, commit.parents[0], commit.sha, "--")
    try:
        parts = [_git(repository, *words, *some).decode() for some in _portions(paths)]
    except UnicodeDecodeError:
        raise RefusedCommit("unreadable") from None
    text = "".join(parts)
    if re.search(r"^[-+]Subproject commit |^Binary files .* differ$", text, re.MULTILINE):
        raise RefusedCommit("unreadable")
    return text


def _portions(paths: Sequence[str]) -> Iterator[Sequence[str]]:
    yield from (paths[start : start + _PATHS_AT_ONCE] for start in range(0, len(paths), _PATHS_AT_ONCE))


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _git(repository: Path, *words: str) -> bytes:
    """Return the output of git as bytes: line ends of a patch must stay as they are."""
    command = [*git(repository, "core.quotePath=false", "diff.noprefix=false"), *words]
    with boundary(ConfigError, "run git"):
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            done = completed(job, _LOG_S)
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"{repository}: git {words[0]} has not ended within {_LOG_S:g} s") from None
    if done.returncode:
        said = "; ".join(done.stderr.decode(errors="replace").splitlines())
        raise ConfigError(f"{repository}: {said[-300:]}")
    return done.stdout


def described(path: Path, known: Sequence[Commit]) -> dict[str, str]:
    """Read descriptions of tasks, one JSON object with `commit` and `text` a line: commit -> text.

    Raise ConfigError if the file cannot be read, or if a line is no such object or names no known commit.
    """
    found = {}
    with boundary(ConfigError, f"read {path}"):
        lines = path.read_bytes().splitlines()
    form = 'it must be {"commit": ID, "text": TEXT}'
    for place, one in task_checks.decode(path, lines, _Description, form):
        meant = [commit.sha for commit in known if one.commit and commit.sha.startswith(one.commit)]
        if len(meant) != 1:
            raise ConfigError(f"{place}: {len(meant)} of {len(known)} commits begin with {one.commit!r}")
        found[meant[0]] = one.text
    return found


class _Description(msgspec.Struct, frozen=True):
    commit: str
    text: str
