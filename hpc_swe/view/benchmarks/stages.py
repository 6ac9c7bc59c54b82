"""Say where the seconds of a weight version went, from the debug lines that both sides log.

The sides run on one host, so that their clocks are one.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from hpc_swe.base import tables
from hpc_swe.base.records import Record

STAGES = {
    "checked": "learner: checks that all is finite",
    "encoded": "learner: finds what changed",
    "written": "learner: writes the files",
    "described": "learner: computes checksums, scores the probe",
    "exported": "learner: publishes",
    "found": "engine: sees the version",
    "verified": "engine: compares checksums",
    "ordered": "engine: tells its workers",
    "staged": "engine: reads, finds what to write",
    "paused": "engine: pauses",
    "swapped": "engine: writes, compares digests",
    "resumed": "engine: clears caches, resumes",
    "probed": "engine: compares the probe",
    "first token": "clients: get the first token",
}
"""First word of a line -> what has ended then, in the order of a version's way."""
FAILURES = ("refused", "passed")
WORKERS = "workers"
BYTES = "bytes"
"""Name of what a worker reads, beside its seconds."""
PARTS = {"stage": "staged", "write": "swapped", "digests": "swapped"}
"""Part of a worker's seconds -> the stage that it belongs to."""


class Moment(Record, frozen=True, kw_only=True):
    """Hold a line of the log and its time."""

    at: float
    """Seconds since the epoch."""
    text: str

    @property
    def word(self) -> str:
        return self.text.split(maxsplit=1)[0]


class MomentLog(logging.Handler):
    """Write each line of this package's log into a file, with its time."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb")

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write(msgspec.json.encode(Moment(at=record.created, text=record.getMessage())) + b"\n")
        self._file.flush()


def note(path: Path) -> None:
    """Log everything of this package, and write it to `path`, too."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    package = logging.getLogger("hpc_swe")
    package.setLevel(logging.DEBUG)
    package.addHandler(MomentLog(path))


def read(*paths: Path) -> list[Moment]:
    """Return the moments of all files in their order; a line that is being written is left out."""
    found = []
    for path in paths:
        text = path.read_bytes() if path.exists() else b""
        found += [msgspec.json.decode(line, type=Moment) for line in text.split(b"\n")[:-1]]
    return sorted(found, key=lambda moment: moment.at)


def failure(moments: Sequence[Moment]) -> str:
    """Return the line by which an engine refused a version; empty if it refused none."""
    return next((moment.text for moment in moments if moment.word in FAILURES), "")


def of_version(moments: Sequence[Moment], start: float, end: float) -> dict[str, float]:
    """Return when each stage of the version ended whose optimizer step ended at `start`."""
    found: dict[str, float] = {}
    for moment in moments:
        if start <= moment.at < end and moment.word in STAGES:
            found.setdefault(moment.word, moment.at)
    return found


def of_workers(moments: Sequence[Moment], start: float, end: float) -> dict[str, float]:
    """Return the seconds of a swap's parts, the slowest worker's, and the most bytes that one read."""
    found: dict[str, float] = {}
    for moment in moments:
        if start <= moment.at < end and moment.word == WORKERS:
            for worker in json.loads(moment.text.removeprefix(WORKERS)):
                found |= {part: max(found.get(part, 0.0), worker.get(part, 0.0)) for part in (*PARTS, BYTES)}
    return found


def table(
    ends: Mapping[str, Mapping[str, float]],
    workers: Mapping[str, Mapping[str, float]],
    starts: Mapping[str, float],
) -> Table:
    """Return the milliseconds of each stage, of each version by name; parts of the workers are indented."""
    found = tables.table(("ms of",), tuple(ends))
    for word, meaning in STAGES.items():
        cells = [_spent(word, ends[name], starts[name]) for name in ends]
        found.add_row(meaning, *cells)
        for part in (part for part, stage in PARTS.items() if stage == word):
            seconds = [workers[name].get(part) for name in ends]
            found.add_row(f"  of it: {part}", *("" if s is None else f"{1000 * s:.0f}" for s in seconds))
    read = (workers[name].get(BYTES) for name in ends)
    found.add_row("GB that a worker read", *("" if size is None else f"{size / 1e9:.3f}" for size in read))
    return found


def _spent(word: str, ends: Mapping[str, float], start: float) -> str:
    """Return the milliseconds since the stage before; nothing for a stage that there was not."""
    if word not in ends:
        return ""
    before = [ends[each] for each in list(STAGES)[: list(STAGES).index(word)] if each in ends]
    return f"{1000 * max(0.0, ends[word] - max([start, *before])):.0f}"
