"""List every episode of a run from the columns of its tables, without reading the episodes themselves."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.records import ScoredEpisode, Split
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.roles.coordinator.batching.groups import dispatch_step
from hpc_swe.roles.coordinator.batching.samples import sampled_tokens

CHUNK = 16  # records, of a megabyte each, that are in memory at once
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.parquet")
OPEN = "open"
"""Name that stands for the table of episodes that no batch has consumed yet."""


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row describes one episode in the page's table."""

    table: str
    number: int
    """Number of the row in its table, from 0."""
    split: Split
    step: int | None
    """Batch or evaluation; None before a batch has consumed the episode."""
    group_id: int
    """In an evaluation, the number of the task."""
    index: int
    task_id: str
    sampling: str = ""
    """Label of an evaluation's decoding; empty in training."""
    outcome: str
    exit_status: str
    reward: float | None
    turns: int
    sampled_tokens: int
    trained: bool | None = None
    """Whether its group was trained; None in an evaluation."""
    dispatch_step: int | None = None
    """Step of the weights that sampled the first token; None in an evaluation."""

    @property
    def id(self) -> str:
        """Return the name of the episode's data file."""
        return f"{self.table}/{self.number:04d}"


COLUMNS = EpisodeRow.__struct_fields__


@dataclass(frozen=True)
class EpisodeTable:
    """A table contains the episodes of one step or of one evaluation."""

    path: Path
    split: Split

    @property
    def name(self) -> str:
        """Return the name of the table's folder in the report."""
        return f"{self.split}-{self.path.stem}"

    @property
    def step(self) -> int:
        """Return the training step; 0 for a run that only evaluates."""
        number = self.path.stem.removeprefix("step_")
        return int(number) if number.isdecimal() else 0

    def rows(self) -> list[EpisodeRow]:
        """Return the table's rows; raise CorruptRecord, which names the file, if it cannot be read."""
        try:
            wanted = set(COLUMNS) & set(pq.read_schema(self.path).names)
            found = pq.read_table(self.path, columns=sorted(wanted)).to_pylist()
            groups = {row["task_id"]: None for row in found}
            numbers = {task: number for number, task in enumerate(groups)}
            common = {"table": self.name, "split": self.split, "step": self.step}
            return [
                msgspec.convert(
                    {"group_id": numbers[row["task_id"]], **row, **common, "number": number}, EpisodeRow
                )
                for number, row in enumerate(found)
            ]
        except (pa.ArrowException, OSError, KeyError, msgspec.ValidationError) as error:
            raise CorruptRecord(f"{self.path}: not a table of episodes: {error}") from None

    def records(self) -> Iterator[bytes]:
        """Yield the encoded `ScoredEpisode` of each row; it is empty where no episode came back.

        Raise CorruptRecord if the file cannot be read; the message names it.
        """
        try:
            for batch in pq.ParquetFile(self.path).iter_batches(CHUNK, columns=["record"]):
                yield from batch.column(0).to_pylist()
        except (pa.ArrowException, OSError, KeyError, IndexError) as error:
            raise CorruptRecord(f"{self.path}: its episodes cannot be read: {error}") from None


def tables(run: RunDir) -> list[EpisodeTable]:
    """Return all tables of a run, the newest step first, evaluations before the batch of their step."""
    found = [EpisodeTable(path, "train") for path in _files(run.archives)]
    found += [EpisodeTable(path, "eval") for path in _files(run.evals)]
    return sorted(found, key=lambda table: (-table.step, table.name))


def _files(folder: Path) -> list[Path]:
    names = atomic.names(folder) if folder.is_dir() else []
    return [folder / name for name in names if NAME.fullmatch(name)]


def open_rows(episodes: Iterable[ScoredEpisode]) -> list[EpisodeRow]:
    """Return the rows of episodes that are in no table yet."""
    return [
        EpisodeRow(
            table=OPEN,
            number=number,
            split=scored.episode.request.split,
            step=None,
            group_id=scored.episode.request.group_id,
            index=scored.episode.request.index,
            task_id=scored.episode.request.task_id,
            outcome=scored.score.outcome,
            exit_status=scored.episode.exit_status.value,
            reward=scored.score.reward,
            turns=len(scored.episode.turns),
            sampled_tokens=sampled_tokens(scored.episode),
            dispatch_step=dispatch_step(scored.episode),
        )
        for number, scored in enumerate(episodes)
    ]
