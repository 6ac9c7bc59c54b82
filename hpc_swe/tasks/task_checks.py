"""Read and write the file of hpc_swe/makers/check.py: one JSON line a check; a task's last line counts."""

import fcntl
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from hpc_swe.base.errors import ConfigError, StorageError, boundary
from hpc_swe.base.records import Task
from hpc_swe.tasks.hidden_tests import Version

Kind = Literal["usable", "unproven", "unsealed", "gold_fails", "empty_passes", "flaky", "broken"]
TAKEN: tuple[Kind, ...] = ("usable", "unproven")
"""Verdicts of tasks that a run takes."""

BYTES = " bytes"
T = TypeVar("T")

log = logging.getLogger(__name__)


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the seconds that grading the reference took, as medians over the runs."""

    bare: float
    """Time of the task's own script on the reference, in a sandbox without any file of a grader."""
    overhead: float
    """Time of a whole grading beyond the bare time of the same run."""


class TaskCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A task's check says whether grading its reference and the empty patch gives the right outcomes."""

    task_id: str
    verdict: Kind
    reason: str = ""
    image: str
    image_digest: str
    settings: str
    """Digest of the grader's settings, the task's tests and its reference."""
    gold: list[str] = []
    """Outcome of each run of the reference."""
    empty: list[str] = []
    """Outcome of each run of the empty patch."""
    seconds: Seconds | None = None
    """None if no run came to its end."""
    spent_s: float = 0.0
    """Seconds that all runs of the check took; 0 is unknown."""
    assertions: int = 0
    """Assertions of the tests that judge the task, where the grader can seal some."""
    sealed: int = 0
    """How many of these have their expected values outside the sandbox."""
    unsealed: dict[str, list[str]] = {}
    """Test file -> lines and columns of assertions that only classes of the reference can compare."""
    remark: str = ""
    """What a person should know about the names of the tests."""
    changed_tests: list[Version] = []
    """Versions of the hidden tests for retests; only usable tasks have them."""
    unchanged: str = ""
    """Reason why a usable task has no retest."""


def read(path: Path) -> dict[str, TaskCheck]:
    """Read the last check of each task, by its id.

    Raise ConfigError if the file cannot be read, or a line is not a check.
    """
    try:
        verdicts = journal(path, TaskCheck, "delete the line, or check again")
    except OSError as error:
        raise ConfigError(
            f"[taskset] checked: {path}: {error.strerror}; hpc_swe/makers/check.py makes it"
        ) from None
    return {verdict.task_id: verdict for verdict in verdicts}


def journal(path: Path, kind: type[T], remedy: str) -> list[T]:
    """Read all lines that `append` wrote; skip an unfinished last one with a warning.

    Raise OSError if the file cannot be read, and ConfigError, with the remedy, if a line is of another kind.
    """
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        log.warning("%s: dropped its last line, which was never finished", path)
    return [one for _, one in decode(path, lines, kind, remedy)]


def decode(path: Path, lines: Iterable[bytes], kind: type[T], remedy: str) -> Iterator[tuple[str, T]]:
    """Yield place and content of each JSON line of a file; raise ConfigError, with the remedy, for others."""
    for number, line in enumerate(lines, start=1):
        try:
            yield f"{path}:{number}", msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{number}: {error}; {remedy}") from None


def usable(path: str, split: str, tasks: Mapping[str, tuple[str, str]]) -> set[str]:
    """Return the ids that a file of checks lets a run take, of tasks given as id -> place and image name.

    Raise ConfigError if a task was not checked, or with another image.
    """
    checks = read(Path(path))
    for task_id, (where, image) in tasks.items():
        known = checks.get(task_id)
        if known is None or known.image != image:
            how = f"with image {known.image}, not {image}," if known else "not"
            raise ConfigError(
                f"{where}: {task_id} is {how} in taskset.checked = {path!r}: run "
                f"python -m hpc_swe.check CONFIG --out {path}"
            )
    kinds = Counter(checks[task_id].verdict for task_id in tasks)
    left_out = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common() if kind not in TAKEN)
    if left_out:
        taken = sum(kinds[kind] for kind in TAKEN)
        log.info("%s: %d of %d tasks are usable; left out: %s", split, taken, len(tasks), left_out)
    return {task_id for task_id in tasks if checks[task_id].verdict in TAKEN}


def require_images(path: str, tasks: Iterable[Task], images: Path) -> None:
    """Raise ConfigError unless the images in a folder are those with which the tasks were checked."""
    checks = read(Path(path))
    for task in tasks:
        if is_another(image_digest(images, task.image), checks[task.task_id].image_digest):
            raise ConfigError(
                f"{task.task_id}: {images / task.image} is another image than taskset.checked = "
                f"{path!r} is of: run python -m hpc_swe.check CONFIG --out {path}"
            )


def sample(tasks: Iterable[Task], count: int | None) -> list[Task]:
    """Return so many tasks, by their ids alone, so that a larger sample holds a smaller one; None is all."""
    if count is None:
        return list(tasks)
    return sorted(tasks, key=lambda task: hashlib.sha256(task.task_id.encode()).digest())[:count]


def require_one_source(tasks: Iterable[Task]) -> None:
    """Raise ConfigError if two tasks name one image by mistake: it would be of another commit or source."""
    firsts: dict[str, Task] = {}
    for task in tasks:
        first = firsts.setdefault(task.image, task)
        if first.base_commit != task.base_commit:
            raise ConfigError(
                f"[taskset] {first.task_id} and {task.task_id} share the image {task.image}, which holds "
                f"one base commit, but have {first.base_commit} and {task.base_commit}: name another in "
                "the column image"
            )
        extras = first.tests.extra, task.tests.extra
        names = [extra.get("image_host", "") + extra.get("image", "") for extra in extras]
        if names[0] != names[1]:
            raise ConfigError(
                f"[taskset] {first.task_id} and {task.task_id} would share the image {task.image}, but name "
                f"{names[0]!r} and {names[1]!r}: select rows of one of them, with ids"
            )


def digest(values: object) -> str:
    """Return 16 hex digits of a hash of the values' JSON."""
    return hashlib.sha256(msgspec.json.encode(values, order="sorted")).hexdigest()[:16]


def image_digest(images: Path, name: str) -> str:
    """Return a digest of an image's manifest; without a manifest the size of its .sif, which a copy keeps."""
    with suppress(OSError):
        return digest((images / f"{name}.json").read_bytes())
    with suppress(OSError):
        return f"{(images / f'{name}.sif').stat().st_size}{BYTES}"
    return ""  # a folder, or not there


def is_another(now: str, then: str) -> bool:
    """Return whether two digests are of different images; digests of two kinds cannot be compared."""
    return bool(now and then) and now.endswith(BYTES) == then.endswith(BYTES) and now != then


def create(path: Path) -> None:
    """Create the file unless it exists; raise StorageError at once if it cannot be written."""
    with boundary(StorageError, f"{path} must be a file that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Raise ConfigError if another command holds this file or folder: both would cut off unfinished lines."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"{path}: another command works there; await its end, or choose another --out"
            raise ConfigError(text) from None
        except OSError as error:
            log.warning("%s has no locks (%s): let no two commands work there", path, error)
        yield
    finally:
        os.close(handle)


def append(path: Path, verdict: msgspec.Struct) -> None:
    """Sync a new line to disk, after removing an unfinished one; raise StorageError if that fails."""
    with boundary(StorageError, f"write {path}"), path.open("ab+") as file:
        file.seek(max(0, file.tell() - 1))
        if file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(msgspec.json.encode(verdict) + b"\n")
        file.flush()
        os.fsync(file.fileno())
