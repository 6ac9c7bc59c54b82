"""Read and write the file of hpc_swe/tasks/check.py: one JSON line a check; a task's last line counts."""

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from hpc_swe.errors import ConfigError, StorageError, boundary
from hpc_swe.plugins.hidden_tests import Version

Kind = Literal["usable", "gold_fails", "empty_passes", "flaky", "broken"]

BYTES = " bytes"

log = logging.getLogger(__name__)


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds that parts of grading the reference took are medians over the runs."""

    open: float
    """Time to start and end the sandbox."""
    apply: float
    """Time between the start of the sandbox and that of the tests."""
    tests: float
    judge: float
    """Time to read the results of the tests, and everything else."""
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
    changed_tests: list[Version] = []
    """Versions of the hidden tests for second sittings; only usable tasks have them."""
    unchanged: str = ""
    """Reason why a usable task has no second sitting."""


def read(path: Path) -> dict[str, TaskCheck]:
    """Read the last check of each task, by its id; skip an unfinished last line with a warning.

    Raises:
        ConfigError: The file cannot be read, or a line is not a check.
    """
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"[taskset] checked: {path}: {error.strerror}; hpc_swe/tasks/check.py makes it"
        ) from None
    if torn:
        log.warning("%s: dropped its last line, which was never finished", path)
    found = {}
    for number, line in enumerate(lines, start=1):
        try:
            verdict = msgspec.json.decode(line, type=TaskCheck)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{number}: {error}; delete the line, or check again") from None
        found[verdict.task_id] = verdict
    return found


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
    """Tell whether two digests are of different images; digests of two kinds cannot be compared."""
    return bool(now and then) and now.endswith(BYTES) == then.endswith(BYTES) and now != then


def create(path: Path) -> None:
    """Create the file unless it exists; raise StorageError at once if it cannot be written."""
    with boundary(StorageError, f"{path} must be a file that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()


def append(path: Path, verdict: msgspec.Struct) -> None:
    """Sync a new line to disk, after removing an unfinished one; raise StorageError if that fails."""
    with boundary(StorageError, f"write {path}"), path.open("ab+") as file:
        file.seek(0)
        text = file.read()
        if not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)
        file.write(msgspec.json.encode(verdict) + b"\n")
        file.flush()
        os.fsync(file.fileno())
