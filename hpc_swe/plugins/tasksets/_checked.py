"""The verdicts of hpc_swe/tasks/check.py: one line a check, of which a task's last counts."""

import hashlib
import logging
import os
from pathlib import Path
from typing import Literal

import msgspec

from hpc_swe.errors import ConfigError, StorageError, boundary
from hpc_swe.plugins.graders.base import Version

Kind = Literal["usable", "gold_fails", "empty_passes", "flaky", "broken"]

BYTES = " bytes"

log = logging.getLogger(__name__)


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of grading the reference went; medians over the runs."""

    open: float
    """Starting and ending the sandbox."""
    apply: float
    """From there to the tests."""
    tests: float
    judge: float
    """Reading what the tests left, and all else."""
    bare: float
    """The task's own script over the reference, in a sandbox with nothing of a grader."""
    overhead: float
    """Of a whole grading, beyond the bare time of the same run."""


class TaskCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What came of grading the reference and nothing, some times over."""

    task_id: str
    verdict: Kind
    reason: str = ""
    image: str
    image_digest: str
    settings: str
    """Digest of the grader's settings, the task's tests and its reference."""
    gold: list[str] = []
    """Outcome of each run."""
    empty: list[str] = []
    seconds: Seconds | None = None
    """None when no run came to its end."""
    changed_tests: list[Version] = []
    """For the second sitting of what resolves it; only of usable tasks."""
    unchanged: str = ""
    """Why a usable task has no second sitting."""


def read(path: Path) -> dict[str, TaskCheck]:
    """Task id -> its last verdict; a last line that was torn off is passed over, aloud.

    Raises:
        ConfigError: The file cannot be read, or a line is none of ours.
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
            raise ConfigError(f"{path}:{number}: {error}; take the line out, or check anew") from None
        found[verdict.task_id] = verdict
    return found


def digest(told: object) -> str:
    """Of a few values."""
    return hashlib.sha256(msgspec.json.encode(told, order="sorted")).hexdigest()[:16]


def image_digest(images: Path, name: str) -> str:
    """Of an image's manifest; of a .sif from elsewhere its size, which a copy keeps; else empty."""
    try:
        return digest((images / f"{name}.json").read_bytes())
    except OSError:
        try:
            return f"{(images / f'{name}.sif').stat().st_size}{BYTES}"
        except OSError:  # a folder, or not there
            return ""


def is_another(now: str, then: str) -> bool:
    """Whether two digests of one name tell of two images; those of two kinds tell nothing."""
    return bool(now and then) and now.endswith(BYTES) == then.endswith(BYTES) and now != then


def create(path: Path) -> None:
    """See that lines can be added, before there are any.

    Raises:
        StorageError: They cannot.
    """
    with boundary(StorageError, f"{path} must be a file that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()


def append(path: Path, verdict: TaskCheck) -> None:
    """Add a line that outlives this process; what a process before left unfinished gives way.

    Raises:
        StorageError: It cannot be written.
    """
    with boundary(StorageError, f"write {path}"), path.open("ab+") as file:
        file.seek(0)
        whole = file.read()
        if not whole.endswith(b"\n"):
            file.truncate(whole.rfind(b"\n") + 1)
        file.write(msgspec.json.encode(verdict) + b"\n")
        file.flush()
        os.fsync(file.fileno())
