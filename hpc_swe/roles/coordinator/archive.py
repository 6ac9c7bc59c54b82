"""archive/episodes/step_n.parquet: every episode that batch n consumed, for people and for later training.

Columns that any tool opens, and the whole record beside them. The table is written after the batch is
committed and before its messages are dropped from scored/, so a crash between the two finds it missing
and the messages still there.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hpc_swe.errors import CorruptRecord
from hpc_swe.records import ScoredEpisode
from hpc_swe.roles.coordinator.groups import dispatch_step
from hpc_swe.roles.coordinator.samples import sampled_tokens
from hpc_swe.store import atomic

SCHEMA = pa.schema(
    [
        ("group_id", pa.int64()),
        ("index", pa.int64()),
        ("task_id", pa.string()),
        ("attempt", pa.int64()),
        ("trained", pa.bool_()),
        ("reward", pa.float64()),
        ("outcome", pa.string()),
        ("exit_status", pa.string()),
        ("dispatch_step", pa.int64()),
        ("turns", pa.int64()),
        ("sampled_tokens", pa.int64()),
        ("sampled_ids", pa.list_(pa.int32())),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("submission", pa.string()),
        ("detail", pa.string()),
        ("record", pa.binary()),
    ]
)


def publish(path: Path, schema: pa.Schema, rows: Sequence[Mapping[str, object]]) -> None:
    """Write a parquet table as a cell."""
    sink = io.BytesIO()
    table = pa.table({name: [row[name] for row in rows] for name in schema.names}, schema=schema)
    pq.write_table(table, sink, compression="zstd")
    atomic.write(path, sink.getvalue())


def write(path: Path, episodes: Sequence[ScoredEpisode], trained: Iterable[int]) -> None:
    """Publish the table; `trained` are the groups that had a loss."""
    groups = set(trained)
    publish(path, SCHEMA, [_row(scored, scored.episode.request.group_id in groups) for scored in episodes])


def read(path: Path) -> list[ScoredEpisode]:
    """The very records that `write` was given."""
    try:
        column = pq.read_table(path, columns=["record"])["record"].to_pylist()
        return [msgspec.msgpack.decode(data, type=ScoredEpisode) for data in column]
    except (pa.ArrowException, KeyError, msgspec.DecodeError) as error:
        raise CorruptRecord(f"{path}: not an archive of episodes: {error}") from error


def _row(scored: ScoredEpisode, trained: bool) -> dict[str, object]:
    episode, score, request = scored.episode, scored.score, scored.episode.request
    return {
        "group_id": request.group_id,
        "index": request.index,
        "task_id": request.task_id,
        "attempt": request.attempt,
        "trained": trained,
        "reward": score.reward,
        "outcome": score.outcome,
        "exit_status": episode.exit_status.value,
        "dispatch_step": dispatch_step(episode),
        "turns": len(episode.turns),
        "sampled_tokens": sampled_tokens(episode),
        "sampled_ids": np.concatenate([np.zeros(0, np.int32), *(t.completion for t in episode.turns)]),
        "messages": [{"role": m.role, "content": m.content} for m in episode.messages],
        "submission": episode.submission,
        "detail": score.detail,
        "record": msgspec.msgpack.encode(scored),
    }
