"""The TensorBoard view, drawn from the logs, the configuration and the archives of a run.

The logs are the truth and the view may be deleted. A step that is written twice, because a role was
restarted from a checkpoint, is one point of one curve: the later line wins.
"""

import logging
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from hpc_swe.errors import StorageError
from hpc_swe.metrics import meaning
from hpc_swe.records import MetricLine, ScoredEpisode
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic
from hpc_swe.transcript import as_text

FIRST = "0_overview"
HEADLINES = re.compile(r"reward/(mean|trained_mean)|solve/(train|eval/.*)|groups/signal_rate")
"""Curves that are drawn a second time under FIRST, whose place is the top of the page."""
LAYOUT = {
    "Does it learn?": {
        "reward": ["reward/mean", "reward/trained_mean"],
        "solve rate": ["solve/train", "solve/eval/.*"],
        "held out, with its interval": ["solve/eval.*"],
        "groups with signal": ["groups/signal_rate"],
    },
    "Can it be trusted?": {
        "infrastructure failures": ["episodes/infra_rate", "grader/sentinel_errors", "outcome/cheated"],
        "endings": ["exit/.*"],
        "staleness": ["staleness/mean", "staleness/max"],
        "learner against sampler": ["gap/mean", "gap/k3", "gap/p99", "policy/surprise_balance"],
        "clipped": ["ratio/clipped_.*", "ratio/.*_share"],
    },
    "How does the policy change?": {
        "loss and divergence": ["policy/loss", "policy/kl"],
        "entropy": ["policy/entropy", "policy/nll"],
        "gradient": ["policy/grad_norm"],
        "learning rate": ["policy/lr"],
        "length": ["episodes/tokens", "episodes/turns"],
    },
    "Where does the time go?": {
        "rates": ["rate/.*"],
        "seconds of an episode": ["seconds/.*"],
        "seconds of a step": ["step_seconds/.*"],
    },
}
"""Category -> chart -> expressions of its curves, in the tab "Custom Scalars"."""
ARCHIVE = re.compile(r"step_\d+\.parquet")
DECILE = re.compile(r"(length/\w+)_d(\d)")
BINS = 10
DECILES = "episodes by decile of sampled tokens, the shortest in 0 .. 1: {} of them"
TOLD, MOST_CHARS, AT_ONCE = 20, 20_000, 16
"""Newest steps whose episodes are told; characters of each; records that are read at once."""

log = logging.getLogger(__name__)


class _Page:
    """One file of TensorBoard's, to which events are appended."""

    def __init__(self, file: Any, described: set[str]) -> None:
        """`described` are the tags of the file that bear their meaning already; it grows."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._writer, self._described = RecordWriter(file), described

    def begin(self, run: RunDir) -> None:
        """The version of the format, the order of the charts, and the run's configuration."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.custom_scalar import layout_pb2, metadata

        self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        layout = layout_pb2.Layout()
        for title, charts in LAYOUT.items():
            category = layout.category.add(title=title)
            for name, tags in charts.items():
                category.chart.add(title=name, multiline=layout_pb2.MultilineChartContent(tag=tags))
        self._tensor(
            metadata.CONFIG_SUMMARY_TAG, layout.SerializeToString(), metadata.create_summary_metadata()
        )
        if run.config.exists():
            text = msgspec.json.format(run.config.read_bytes(), indent=2).decode()
            self.text("run/configuration", text, "run.json, every default written out")

    def number(self, name: str, step: int, at: float, value: float) -> None:
        """One point of a curve, and of its double in the overview."""
        from tensorboard.plugins.scalar import metadata

        doubles = [f"{FIRST}/{name.replace('/', '_')}"] if HEADLINES.fullmatch(name) else []
        for tag in (name, *doubles):
            about = metadata.create_summary_metadata("", meaning(name))
            self._event(tag, about, step, at, simple_value=value)

    def deciles(self, name: str, step: int, at: float, counts: Sequence[float]) -> None:
        """A histogram over deciles."""
        import numpy as np
        from tensorboard.plugins.histogram import metadata

        buckets = np.array([(left, left + 1, count) for left, count in enumerate(counts)], np.float64)
        about = metadata.create_summary_metadata("", DECILES.format(name.rpartition("/")[2]))
        self._tensor(name, buckets, about, step, at)

    def text(self, tag: str, text: str, about: str, step: int = 0) -> None:
        """Text as it is: indented, Markdown leaves it alone."""
        from tensorboard.plugins.text import metadata

        lines = "\n".join(f"    {line}" for line in text.splitlines())
        self._tensor(tag, lines.encode(), metadata.create_summary_metadata("", about), step)

    def flush(self) -> None:
        """To the file."""
        self._writer.flush()

    def _tensor(self, tag: str, value: Any, about: Any, step: int = 0, at: float = 0.0) -> None:
        from tensorboard.util.tensor_util import make_tensor_proto

        self._event(tag, about, step, at or time.time(), tensor=make_tensor_proto(value))

    def _event(self, tag: str, about: Any, step: int, at: float, **value: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        # Of each tag TensorBoard keeps what the first value says of it.
        described = {} if tag in self._described else {"metadata": about}
        self._described.add(tag)
        found = Summary.Value(tag=tag, **described, **value)
        self._writer.write(Event(wall_time=at, step=step, summary=Summary(value=[found])).SerializeToString())


class Drawing:
    """The view in tensorboard/, drawn anew at the start and kept up by `update`."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._offsets: dict[Path, int] = {}
        self._points: dict[str, dict[int, MetricLine]] = {}
        self._last: dict[str, int] = {}
        """Newest step drawn, by curve."""
        self._told: set[str] = set()
        """Archives whose episodes are drawn."""
        self._described: set[str] = set()
        self._path: Path | None = None
        """None when all is to be drawn anew."""

    def update(self) -> None:
        """Draw what was logged since. A line about a step already drawn draws everything anew."""
        try:
            for line in sorted(self._new_lines(), key=lambda line: line.time):
                for name in line.values:
                    self._points.setdefault(name, {})[line.step] = line
                    if line.step <= self._last.get(name, -1):
                        self._path = None
            self._append(self._path or self._restart())
        except (OSError, StorageError) as error:
            self._path = None  # half a record may have been written
            log.warning("not drawn: %s", error)

    def _new_lines(self) -> list[MetricLine]:
        lines = []
        for path in sorted(self._run.metrics.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + bool(whole)
            lines += [line for text in whole.splitlines() if text and (line := _parse(path, text))]
        return lines

    def _restart(self) -> Path:
        old = list(self._run.tensorboard.glob("events.out.tfevents.*"))
        for path in old:
            path.unlink(missing_ok=True)
        # TensorBoard reads the files of a folder by name, so the new name must be the last.
        stamps = [stamp for p in old if (stamp := p.name.split(".")[3]).isdecimal()]
        number = max([time.time_ns(), *(int(stamp) + 1 for stamp in stamps)])
        self._path = self._run.tensorboard / f"events.out.tfevents.{number}.hpc_swe"
        self._last, self._told, self._described = {}, set(), set()
        return self._path

    def _append(self, path: Path) -> None:
        todo = {
            name: [step for step in sorted(points) if step > self._last.get(name, -1)]
            for name, points in self._points.items()
        }
        steps = sorted({step for missing in todo.values() for step in missing})
        with path.open("ab") as file:
            page = _Page(file, self._described)
            if file.tell() == 0:
                page.begin(self._run)
            for step in steps:
                due = {name: self._points[name][step] for name in sorted(todo) if step in todo[name]}
                self._draw(page, step, due)
            for name in self._untold():
                self._tell(page, name)
            page.flush()

    def _draw(self, page: _Page, step: int, due: dict[str, MetricLine]) -> None:
        """All that is due of one step."""
        deciles: dict[str, list[float]] = {}
        for name, line in due.items():
            decile = DECILE.fullmatch(name)
            if decile is None:
                page.number(name, step, line.time, line.values[name])
            else:
                deciles.setdefault(decile[1], [0.0] * BINS)[int(decile[2])] = line.values[name]
            self._last[name] = step
        for name, counts in deciles.items():
            page.deciles(name, step, due[f"{name}_d0"].time if f"{name}_d0" in due else time.time(), counts)

    def _untold(self) -> list[str]:
        """Archives of the newest steps that are not drawn yet."""
        names = [name for name in atomic.names(self._run.archives) if ARCHIVE.fullmatch(name)]
        return [name for name in names[-TOLD:] if name not in self._told]

    def _tell(self, page: _Page, name: str) -> None:
        """Three episodes of a step as text."""
        self._told.add(name)
        step = name.removesuffix(".parquet").rpartition("_")[2]
        try:
            found = [(kind, as_text(scored)) for kind, scored in _telling(self._run.archives / name)]
        except (pa.ArrowException, OSError, KeyError, msgspec.DecodeError) as error:
            log.warning("%s: its episodes are not drawn: %s", name, error)
            return
        for kind, text in found:
            cut = text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}\n(cut; `show` has all of it)"
            page.text(f"episodes/{kind}", cut, f"{kind}, of the batch of this step", int(step))


def _telling(path: Path) -> Iterator[tuple[str, ScoredEpisode]]:
    """The first episode of an archive that resolved, the first that did not, and the longest other seen."""
    found: dict[str, ScoredEpisode] = {}
    others: list[ScoredEpisode] = []
    for rows in pq.ParquetFile(path).iter_batches(AT_ONCE, columns=["record"]):
        for data in rows.column(0).to_pylist():
            scored = msgspec.msgpack.decode(data, type=ScoredEpisode)
            kind = "resolved" if scored.score.outcome == "resolved" else "unresolved"
            if kind in found:
                others.append(scored)
            found.setdefault(kind, scored)
        if len(found) == 2 and others:
            break
    yield from found.items()
    if others:
        yield "longest", max(others, key=lambda s: sum(len(t.completion_ids) for t in s.episode.turns))


def _parse(path: Path, text: bytes) -> MetricLine | None:
    try:
        return msgspec.json.decode(text, type=MetricLine)
    except msgspec.DecodeError as error:
        log.warning("%s: skipped a line: %s", path, error)
        return None
