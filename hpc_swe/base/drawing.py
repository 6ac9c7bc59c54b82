"""Draw the TensorBoard view from the logs and the configuration of a run.

The logs are the source and the view may be deleted. A step that was logged twice, because a role restarted
from a checkpoint, is one point of one curve: the later line counts.
"""

import logging
import re
import time
from pathlib import Path
from typing import Any

import msgspec
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.scalar import metadata as scalar
from tensorboard.plugins.text import metadata as texts
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from hpc_swe.base.errors import StorageError
from hpc_swe.base.metrics import LAYOUT, Tail, meaning
from hpc_swe.base.records import MetricLine
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic

FIRST = "0_overview"
HEADLINES = re.compile(r"reward/(mean|trained_mean)|solve/(train|eval/.*)|groups/signal_rate|validation/loss")
"""Curves that are drawn a second time under FIRST, which stands at the top of the page."""

log = logging.getLogger(__name__)


class _EventFile:
    """Events are appended to one file of TensorBoard's format."""

    def __init__(self, file: Any, described: set[str]) -> None:
        """Take over an open file; `described` holds the tags that have a description in it, and grows."""
        self._writer, self._described = RecordWriter(file), described

    def write_header(self, run: RunDir) -> None:
        """Write the version of the format, the order of the charts, and the run's configuration."""
        self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        layout = layout_pb2.Layout()
        for title, charts in LAYOUT.items():
            category = layout.category.add(title=title)
            for name, patterns in charts.items():
                tags = [f"^{pattern}$" for pattern in patterns]  # TensorBoard searches within names
                category.chart.add(title=name, multiline=layout_pb2.MultilineChartContent(tag=tags))
        about = custom_scalar.create_summary_metadata()
        self._tensor(custom_scalar.CONFIG_SUMMARY_TAG, layout.SerializeToString(), about)
        if run.config.exists():
            text = msgspec.json.format(atomic.read(run.config), indent=2).decode()
            self.text("run/configuration", text, "run.json, with every default written out")

    def number(self, name: str, step: int, at: float, value: float) -> None:
        """Write one point of a curve, and of its copy in the overview."""
        copies = [f"{FIRST}/{name.replace('/', '_')}"] if HEADLINES.fullmatch(name) else []
        about = scalar.create_summary_metadata("", meaning(name))
        for tag in (name, *copies):
            self._event(tag, about, step, at, simple_value=value)

    def text(self, tag: str, text: str, about: str) -> None:
        """Write a text unchanged: indentation keeps Markdown from formatting it."""
        lines = "\n".join(f"    {line}" for line in text.splitlines())
        self._tensor(tag, lines.encode(), texts.create_summary_metadata("", about))

    def _tensor(self, tag: str, value: bytes, about: Any) -> None:
        self._event(tag, about, 0, time.time(), tensor=make_tensor_proto(value))

    def _event(self, tag: str, about: Any, step: int, at: float, **value: Any) -> None:
        # TensorBoard keeps the description of a tag's first value.
        described = {} if tag in self._described else {"metadata": about}
        self._described.add(tag)
        found = Summary.Value(tag=tag, **described, **value)
        self._writer.write(Event(wall_time=at, step=step, summary=Summary(value=[found])).SerializeToString())


class Drawing:
    """The view in tensorboard/ is drawn in full by the first `update` and kept up to date by later ones."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._tail = Tail(run.metrics)
        self._points: dict[str, dict[int, MetricLine]] = {}
        self._last: dict[str, int] = {}
        """Newest step drawn, by curve."""
        self._described: set[str] = set()
        self._path: Path | None = None
        """File of the view; None when everything must be drawn again."""

    def update(self) -> None:
        """Draw what was logged since the last update; a line about a drawn step redraws everything."""
        try:
            for line in sorted(self._tail.new_lines(), key=lambda line: line.time):
                for name in line.values:
                    self._points.setdefault(name, {})[line.step] = line
                    if line.step <= self._last.get(name, -1):
                        self._path = None
            self._append(self._path or self._restart())
        except (OSError, StorageError) as error:
            self._path = None  # the last record may be incomplete
            log.warning("not drawn: %s", error)

    def _restart(self) -> Path:
        number = time.time_ns()
        for path in self._run.tensorboard.glob("events.out.tfevents.*"):
            path.unlink(missing_ok=True)
            # TensorBoard reads the files of a folder by name, so the new name must sort last.
            stamp = path.name.split(".")[3]
            number = max(number, int(stamp) + 1) if stamp.isdecimal() else number
        self._path = self._run.tensorboard / f"events.out.tfevents.{number}.hpc_swe"
        self._last, self._described = {}, set()
        return self._path

    def _append(self, path: Path) -> None:
        todo: dict[int, dict[str, MetricLine]] = {}
        for name, points in sorted(self._points.items()):
            for step, line in points.items():
                if step > self._last.get(name, -1):
                    todo.setdefault(step, {})[name] = line
        with path.open("ab") as file:
            events = _EventFile(file, self._described)
            if file.tell() == 0:
                events.write_header(self._run)
            for step, lines in sorted(todo.items()):
                for name, line in lines.items():
                    events.number(name, step, line.time, line.values[name])
                    self._last[name] = step
