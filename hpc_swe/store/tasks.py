"""The run's tasks as one parquet file: written once, opened by people with any tool."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hpc_swe.errors import CorruptRecord
from hpc_swe.records import Split, Task
from hpc_swe.store import atomic

SPLITS: tuple[Split, ...] = ("train", "eval")


def write(path: Path, tasks: Mapping[Split, Sequence[Task]]) -> None:
    """Publish the tasks; columns for people, and the record whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [(split, task) for split in SPLITS for task in tasks.get(split, ())]
    table = pa.table(
        {
            "task_id": [task.task_id for _, task in rows],
            "split": [split for split, _ in rows],
            "taskset": [task.taskset for _, task in rows],
            "prompt": [task.prompt for _, task in rows],
            "image": [task.image for _, task in rows],
            "record": [msgspec.msgpack.encode(task) for _, task in rows],
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    atomic.write(path, sink.getvalue().to_pybytes())


def write_hidden(path: Path, texts: dict[str, str]) -> None:
    """Publish what is known of tasks by their ids, apart from them: no rollout worker ever holds it."""
    atomic.write(path, msgspec.json.encode(texts))


def read_hidden(path: Path) -> dict[str, str]:
    """Inverse of `write_hidden`; empty for a task set that gives none.

    Raises:
        CorruptRecord: It is there, and is none.
        StorageError: The file system refuses.
    """
    try:
        with atomic.storage(path):
            return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"{path}: not what a run hides: {error}") from error


def read(path: Path) -> dict[Split, list[Task]]:
    """Inverse of `write`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: dict[Split, list[Task]] = {"train": [], "eval": []}
    try:
        table = pq.read_table(path, columns=["split", "record"])
        for split, data in zip(table["split"].to_pylist(), table["record"].to_pylist(), strict=True):
            found[split].append(msgspec.msgpack.decode(data, type=Task))
    except (pa.ArrowException, KeyError, msgspec.DecodeError) as error:
        raise CorruptRecord(f"{path}: not the tasks of a run: {error}") from error
    return found
