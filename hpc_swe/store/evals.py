"""One finished evaluation as a parquet file, one row an episode: written once, opened with any tool.

Columns for people, and the whole record beside them, as in the archive of training's episodes.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import get_type_hints

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from hpc_swe.errors import CorruptRecord
from hpc_swe.records import Message, Outcome, Record
from hpc_swe.store import atomic

CALLS = pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.string())]))
TEXTS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", CALLS)]))
"""A conversation: `Message`s with what they call."""


class Attempt(Record, frozen=True, kw_only=True):
    """One episode of an evaluation. What infrastructure failed to the last is ``infra_error``."""

    task_id: str
    index: int
    """Among all episodes of the task."""
    sampling: str
    """Label of the decoding."""
    sample: int
    """Among those of the decoding, from 0."""
    outcome: Outcome
    reward: float | None
    exit_status: str = ""
    """Empty when no episode came back."""
    retries: int = 0
    """Infrastructure failures before this attempt."""
    turns: int = 0
    sampled_tokens: int = 0
    sandbox_s: float = 0.0
    engine_s: float = 0.0
    tools_s: float = 0.0
    episode_s: float = 0.0
    """The whole episode, its grading apart."""
    grading_s: float = 0.0
    queue_s: float = 0.0
    versions: list[str] = []
    """Weights that sampled it; v000000-i00 are those that the engine was started with."""
    submission: str = ""
    passed: list[str] = []
    failed: list[str] = []
    detail: str = ""
    """What the grader said, or what broke."""
    messages: list[Message] = []
    record: bytes = b""
    """The ScoredEpisode as MessagePack, tokens and all; empty when no episode came back."""


WORDY = ("submission", "passed", "failed", "detail", "messages", "record")
"""Columns that are long."""
LONGEST = ("messages", "record")
_KINDS: dict[type | UnionType, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    float | None: pa.float64(),
    list[str]: pa.list_(pa.string()),
    list[Message]: TEXTS,
    bytes: pa.binary(),
}
SCHEMA = pa.schema([(name, _KINDS.get(kind, pa.string())) for name, kind in get_type_hints(Attempt).items()])


def write(path: Path, attempts: Sequence[Attempt], *, without: Sequence[str] = ()) -> None:
    """Publish the table."""
    rows = [msgspec.to_builtins(attempt, builtin_types=(bytes,)) for attempt in attempts]
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows, schema=SCHEMA).drop_columns(list(without))
    pq.write_table(table, sink, compression="zstd")
    atomic.write(path, sink.getvalue())


def read(path: Path, *, without: Sequence[str] = LONGEST) -> list[Attempt]:
    """Inverse of `write`, columns that are not asked for apart.

    Raises:
        CorruptRecord: There is no such table, or it is none of an evaluation.
    """
    try:
        columns = [name for name in SCHEMA.names if name not in without]
        return msgspec.convert(pq.read_table(path, columns=columns).to_pylist(), list[Attempt])
    except FileNotFoundError:
        raise CorruptRecord(f"{path}: no such table; an evaluation writes it when it has finished") from None
    except (pa.ArrowException, OSError, msgspec.ValidationError) as error:
        raise CorruptRecord(f"{path}: not the table of an evaluation: {error}") from error
