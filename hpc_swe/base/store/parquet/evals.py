"""Store a finished evaluation as a parquet file with one row per episode, which any tool can open.

It has columns for people and, beside them, the whole record, as in the archive of training's episodes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import get_type_hints

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.records import Message, Outcome, Record
from hpc_swe.base.store import atomic

CALLS = pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.string())]))
CONVERSATION = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", CALLS)]))
"""A list of `Message`s with their tool calls."""


class Attempt(Record, frozen=True, kw_only=True):
    """Describe one episode of an evaluation; ``infra_error`` if all its attempts failed on infrastructure."""

    task_id: str
    index: int
    """Number among all episodes of the task, from 0."""
    sampling: str
    """Label of the decoding."""
    sample: int
    """Number among the task's episodes of this decoding, from 0."""
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
    """The whole episode without its grading."""
    grading_s: float = 0.0
    queue_s: float = 0.0
    calls: list[str] = []
    """Names of the tools that the policy called, in order."""
    versions: list[str] = []
    """Weight versions that sampled it; v000000-i00 is the model that the engine was started with."""
    submission: str = ""
    passed: list[str] = []
    failed: list[str] = []
    detail: str = ""
    """The grader's message, or the error."""
    messages: list[Message] = []
    record: bytes = b""
    """The ScoredEpisode as MessagePack, with its tokens; empty when no episode came back."""


LONG_COLUMNS = ("submission", "passed", "failed", "detail", "messages", "record")
LONGEST_COLUMNS = ("messages", "record")
_KINDS: dict[type | UnionType, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    float | None: pa.float64(),
    list[str]: pa.list_(pa.string()),
    list[Message]: CONVERSATION,
    bytes: pa.binary(),
}
SCHEMA = pa.schema([(name, _KINDS.get(kind, pa.string())) for name, kind in get_type_hints(Attempt).items()])


def write(
    path: Path,
    attempts: Sequence[Attempt],
    *,
    without: Sequence[str] = (),
    publish: Callable[[Path, bytes], None] = atomic.write,
) -> None:
    """Publish the table, leaving out the columns `without`."""
    rows = [msgspec.to_builtins(attempt, builtin_types=(bytes,)) for attempt in attempts]
    atomic.put_table(path, pa.Table.from_pylist(rows, schema=SCHEMA).drop_columns(list(without)), publish)


def read(path: Path, *, without: Sequence[str] = LONGEST_COLUMNS) -> list[Attempt]:
    """Read what `write` published; fields of the columns `without`, or of none, keep their defaults.

    Raise CorruptRecord if the file is missing, or is not the table of an evaluation.
    """
    try:
        wanted = [name for name in SCHEMA.names if name not in without]
        columns = [name for name in pq.read_schema(path).names if name in wanted]
        return msgspec.convert(atomic.get_table(path, columns).to_pylist(), list[Attempt])
    except FileNotFoundError:
        raise CorruptRecord(f"{path}: no such table; an evaluation writes it when it has finished") from None
    except (pa.ArrowException, OSError, msgspec.ValidationError) as error:
        raise CorruptRecord(f"{path}: not the table of an evaluation: {error}") from error
