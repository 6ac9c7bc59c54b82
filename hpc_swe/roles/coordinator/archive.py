"""Keep every episode that batch n consumed in archive/episodes/step_n.parquet, for people and later training.

The table has columns that any tool can read, and the whole record but for the routing of turns. It is written
after the batch is committed and before its messages are removed from scored/, so they still exist when a
crash prevents the table.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.records import Episode, IdArray, ScoredEpisode
from hpc_swe.base.store import atomic
from hpc_swe.base.store.parquet.evals import CONVERSATION
from hpc_swe.roles.coordinator.batching.groups import dispatch_step
from hpc_swe.roles.coordinator.batching.samples import drop_routing, sampled_tokens

NAME = re.compile(r"step_[0-9]{6,}\.parquet")


def write(path: Path, episodes: Sequence[ScoredEpisode], trained: Iterable[int]) -> None:
    """Publish the table, unless there is one; `trained` are the ids of the groups with a loss.

    The first table is complete, since messages are removed after it: a second coordinator that read them
    meanwhile, or that was frozen, may know fewer.
    """
    groups = set(trained)
    columns: dict[str, tuple[pa.DataType, Callable[[ScoredEpisode], object]]] = {
        "group_id": (pa.int64(), lambda s: s.episode.request.group_id),
        "index": (pa.int64(), lambda s: s.episode.request.index),
        "task_id": (pa.string(), lambda s: s.episode.request.task_id),
        "attempt": (pa.int64(), lambda s: s.episode.request.attempt),
        "trained": (pa.bool_(), lambda s: s.episode.request.group_id in groups),
        "reward": (pa.float64(), lambda s: s.score.reward),
        "outcome": (pa.string(), lambda s: s.score.outcome),
        "exit_status": (pa.string(), lambda s: s.episode.exit_status.value),
        "dispatch_step": (pa.int64(), lambda s: dispatch_step(s.episode)),
        "turns": (pa.int64(), lambda s: len(s.episode.turns)),
        "sampled_tokens": (pa.int64(), lambda s: sampled_tokens(s.episode)),
        "sampled_ids": (pa.list_(pa.int32()), lambda s: _sampled_ids(s.episode)),
        "messages": (CONVERSATION, lambda s: msgspec.to_builtins(s.episode.messages)),
        "submission": (pa.string(), lambda s: s.episode.submission),
        "detail": (pa.string(), lambda s: s.score.detail),
        "record": (pa.binary(), _record),
    }
    schema = pa.schema([(name, kind) for name, (kind, _) in columns.items()])
    rows = [{name: value(scored) for name, (_, value) in columns.items()} for scored in episodes]
    with suppress(FileExistsError):
        atomic.put_table(path, pa.Table.from_pylist(rows, schema=schema), atomic.write_new)


def read(path: Path) -> list[ScoredEpisode]:
    """Read back the records that `write` wrote; raise CorruptRecord if the file is not such a table."""
    try:
        column = atomic.get_table(path, ["record"])["record"].to_pylist()
        return [msgspec.msgpack.decode(data, type=ScoredEpisode) for data in column]
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"{path}: not an archive of episodes: {error}") from error


def _record(scored: ScoredEpisode) -> bytes:
    return msgspec.msgpack.encode(replace(scored, episode=drop_routing(scored.episode)))


def _sampled_ids(episode: Episode) -> IdArray:
    return np.concatenate([np.zeros(0, np.int32), *(turn.completion for turn in episode.turns)])
