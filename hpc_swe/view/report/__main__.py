"""Write a run as pages for a browser: python -m hpc_swe.report RUN, then open RUN/report/index.html.

The folder needs no server and no network; copy it where you like. The table lists every episode. The newest
ones, and those that --steps names, are written whole: each can be read turn by turn and token by token.
"""

import argparse
import itertools
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpc_swe import __version__
from hpc_swe.base import cli
from hpc_swe.base.errors import ConfigError, CorruptRecord, HpcSweError
from hpc_swe.base.records import RunManifest, ScoredEpisode
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, sharing, weights
from hpc_swe.base.transcript import clean
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import existing
from hpc_swe.roles.coordinator.batching.batches import BatchSettings
from hpc_swe.view import exhibits
from hpc_swe.view.report import curves, episodes, index, pages
from hpc_swe.view.report.episodes import Data
from hpc_swe.view.report.index import EpisodeRow, EpisodeTable
from hpc_swe.view.report.pages import ReportFolder
from hpc_swe.view.report.spelling import Speller
from hpc_swe.view.report.training import BatchRule, Use

EPISODES = 1000
Span = tuple[int, int]


@dataclass(frozen=True)
class WholeEpisodes:
    """Choose the episodes that are written whole: the newest ones, and all of some steps."""

    newest: int | None = EPISODES
    """None is all."""
    steps: Sequence[Span] = ()
    """First and last step of each interval."""
    task: str = ""
    """Only episodes of this task; empty is any."""

    def ids(self, rows: Iterable[EpisodeRow]) -> set[str]:
        """Choose among rows that are sorted from the newest to the oldest."""
        fitting = [row for row in rows if self.task in ("", row.task_id)]
        return {
            row.id
            for number, row in enumerate(fitting)
            if self.newest is None or number < self.newest or self._names(row.step)
        }

    def _names(self, step: int | None) -> bool:
        return step is not None and any(first <= step <= last for first, last in self.steps)


@dataclass
class Report:
    """A report is collected from a run; what cannot be read becomes a note on the page."""

    run: RunDir
    folder: ReportFolder
    notes: list[str] = field(default_factory=list)
    config: RunConfig | None = None
    rule: BatchRule | None = None
    speller: Speller | None = None
    rows: list[EpisodeRow] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    """Ids of the episodes that are written whole."""

    def read_configuration(self) -> None:
        """Read what tells which tokens were trained and how they are spelt; a run can be shown without."""
        try:
            self.config = existing.load(self.run, reads=True)
            self.rule = BatchRule(_settings(self.config))
        except HpcSweError as error:
            self.notes.append(f"what was trained, and the texts of tokens, are not shown: {error}")
            return
        try:
            self.speller = _speller(self.run, self.config)
        except (HpcSweError, PermissionError) as error:  # the model may be closed to who reads a shared run
            self.notes.append(f"tokens are shown as ids, because their texts are not known: {error}")

    def write_episodes(self, choice: WholeEpisodes) -> None:
        """List all episodes, and write those that `choice` names."""
        waiting = list(exhibits.unconsumed(self.run))
        open_rows = index.open_rows(waiting)
        tables = [(table, self._rows(table)) for table in index.tables(self.run)]
        self.rows = [*open_rows, *(row for _, rows in tables for row in rows)]
        chosen = choice.ids(self.rows)
        for row, scored in zip(open_rows, waiting, strict=True):
            if row.id in chosen:
                use = Use("no batch has consumed it yet")
                self._write(row.id, episodes.whole(scored, use, self.speller))
        for table, rows in tables:
            if any(row.id in chosen for row in rows):
                try:
                    self._write_table(table, rows, chosen)
                except CorruptRecord as error:
                    self.notes.append(str(error))

    def _rows(self, table: EpisodeTable) -> list[EpisodeRow]:
        try:
            return table.rows()
        except CorruptRecord as error:
            self.notes.append(str(error))
            return []

    def _write_table(self, table: EpisodeTable, rows: Sequence[EpisodeRow], chosen: Collection[str]) -> None:
        pairs = zip(rows, table.records(), strict=False)
        for _, group in itertools.groupby(pairs, key=lambda pair: pair[0].group_id):
            members = [(row, data) for row, data in group if data]
            if any(row.id in chosen for row, _ in members):
                try:
                    shown = self._shown(members, chosen)
                except (msgspec.DecodeError, ValueError, LookupError) as error:
                    raise CorruptRecord(f"{table.path}: an episode cannot be read: {error}") from None
                for name, value in shown.items():
                    self._write(name, value)

    def _shown(self, members: Sequence[tuple[EpisodeRow, bytes]], chosen: Collection[str]) -> dict[str, Data]:
        """Return id -> data of the chosen members of a group; what was trained depends on all of them."""
        found = [msgspec.msgpack.decode(data, type=ScoredEpisode) for _, data in members]
        uses = self._uses(members[0][0], found)
        return {
            row.id: episodes.whole(scored, use, self.speller)
            for (row, _), scored, use in zip(members, found, uses, strict=True)
            if row.id in chosen
        }

    def _uses(self, row: EpisodeRow, found: Sequence[ScoredEpisode]) -> Sequence[Use]:
        if row.split == "eval":
            return [Use("an evaluation trains nothing")] * len(found)
        if self.rule is None or row.step is None:
            return [Use("the run's configuration cannot be read")] * len(found)
        try:
            return self.rule.uses(found, row.step, bool(row.trained))
        except ConfigError as error:  # of an estimator that refuses these rewards
            return [Use(str(error))] * len(found)

    def _write(self, name: str, value: Data) -> None:
        self.folder.add(name, value)
        self.whole.append(name)

    def write_run(self) -> None:
        """Write the table of episodes, and what the page shows first."""
        whole = set(self.whole)
        rows = [[clean_value(value) for value in msgspec.structs.astuple(row)] for row in self.rows]
        self.folder.add(
            "index",
            {
                "columns": index.COLUMNS,
                "rows": rows,
                "whole": [number for number, row in enumerate(self.rows) if row.id in whole],
            },
        )
        points, torn = curves.read(self.run)
        self.notes += torn
        config = self.config
        self.folder.add(
            "run",
            {
                "name": clean(self.run.root.name),
                "path": clean(str(self.run.root)),
                "mode": config.mode if config else "",
                "steps": config.steps if config else 0,
                "model": clean(config.model) if config else "",
                "finished": self.run.finished.exists(),
                "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
                "version": __version__,
                "notes": [clean(note) for note in self.notes],
                "charts": curves.charts(points),
                "configuration": self._configuration(),
                "episodes": len(rows),
                "whole": len(whole),
            },
        )

    def _configuration(self) -> str:
        if self.config is None:
            return clean(self.run.config.read_text(encoding="utf-8", errors="replace"))
        return clean("\n".join(configuration.toml(configuration.dump(self.config))))


def clean_value(value: object) -> object:
    """Return a cell of the table with the control characters of texts escaped."""
    return clean(value) if isinstance(value, str) else value


def _settings(config: RunConfig) -> BatchSettings:
    data_parallel = config.learner.data_parallel
    return BatchSettings(config.groups, config.batches, config.advantage, data_parallel, config.shaping)


def _speller(run: RunDir, config: RunConfig) -> Speller:
    """Read the tokenizer beside the run's newest weights, or else beside the model that it started from."""
    version = weights.newest(run) if sharing.entries(run.weights) else None
    model = Path(atomic.get(run.manifest, RunManifest).folder, config.model)
    folders = [*([run.weight(version)] if version else []), model]
    return Speller(next((f for f in folders if (f / "tokenizer.json").exists()), model))


def write(run: RunDir, out: Path, choice: WholeEpisodes) -> Report:
    """Write the report of a run at `out`, in place of an older one.

    Raise ConfigError if there is no run, or something else than a report is at `out`, and HpcSweError if the
    report cannot be written.
    """
    if not run.config.exists():
        existing.load(run, reads=True)  # raises, and says what is there instead
    with pages.publishing(out) as folder:
        report = Report(run, folder)
        report.read_configuration()
        report.write_episodes(choice)
        report.write_run()
    return report


def spans(text: str) -> list[Span]:
    """Parse steps such as 12,20-25.

    Raise argparse.ArgumentTypeError if a part is neither a step nor an interval.
    """
    return [_span(part.strip()) for part in text.split(",")]


def _span(part: str) -> Span:
    found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if last < first:
        raise argparse.ArgumentTypeError(f"{part!r} is no step; name some as in 12,20-25")
    return first, last


def _count(text: str) -> int | None:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of episodes; name one, or all")
    return None if text == "all" else int(text)


EXAMPLES = (
    "runs/demo-0/grpo",
    "runs/demo-0/grpo --episodes all",
    "runs/demo-0/grpo --steps 12,20-25 --out pages",
)


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("hpc_swe.report", "Write a run as pages that a browser shows from files.", *EXAMPLES)
    add = parser.add_argument
    add("run", type=cli.folder, help="folder of a run or of an evaluation, also while it works")
    add("--out", type=cli.folder, help="folder of the report (default: report/ in the run)")
    add(
        "--episodes",
        type=_count,
        default=EPISODES,
        metavar="N",
        help="write so many episodes whole, the newest first; or all",
    )
    add("--steps", type=spans, default=(), help="write all episodes of these steps, too: 12,20-25")
    add("--task", default="", help="write only episodes of this task")
    return parser


@cli.command
def main() -> None:
    """Write the report, and say where it is and what it could not show."""
    os.umask(0o077)
    arguments, started = cli.parse(_parser()), time.monotonic()
    run = RunDir(arguments.run)
    choice = WholeEpisodes(arguments.episodes, arguments.steps, arguments.task)
    out = arguments.out or run.report
    report = write(run, out, choice)
    for note in report.notes:
        print(f"warning: {clean(note)}", file=sys.stderr)
    size, seconds = report.folder.bytes / 1e6, time.monotonic() - started
    print(
        f"{out / pages.INDEX}: {len(report.rows)} episodes, {len(report.whole)} of them whole, "
        f"{size:.1f} MB in {seconds:.1f} s; open it with a browser"
    )


if __name__ == "__main__":
    main()
