"""Store the run's tasks as one parquet file, written once, which people can open with any tool."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.records import Split, Task
from hpc_swe.base.store import atomic

SPLITS: tuple[Split, ...] = ("train", "eval")


def content(task: Task) -> tuple[object, ...]:
    """Return what makes two tasks the same problem, whatever they are called.

    Which of its tests a task shows may depend on its name, so files of tests count as they are graded.
    """
    shown = {path: text for path, text in task.files.items() if path not in task.tests.files}
    parts = (task.tests.files, shown)
    return task.prompt, task.base_commit, task.start, *(tuple(sorted(part.items())) for part in parts)


def write(path: Path, tasks: Mapping[Split, Sequence[Task]]) -> None:
    """Publish the tasks: columns for people, and the whole record beside them."""
    import pyarrow as pa

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
    atomic.put_table(path, table, atomic.write_secret)  # it holds hidden tests


def write_hidden(path: Path, texts: dict[str, str]) -> None:
    """Publish hidden texts by task id, in a file of their own that no rollout worker reads."""
    atomic.write_secret(path, msgspec.json.encode(texts))


def read_hidden(path: Path) -> dict[str, str]:
    """Read what `write_hidden` published; empty when the taskset has no hidden texts.

    Raise CorruptRecord if the file cannot be decoded, and StorageError if the file system refused.
    """
    try:
        return msgspec.json.decode(atomic.read(path), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"{path}: not a file of hidden texts: {error}") from error


def read(path: Path) -> dict[Split, list[Task]]:
    """Read what `write` published, by split; raise CorruptRecord if it is not the tasks of a run."""
    found: dict[Split, list[Task]] = {"train": [], "eval": []}
    table = atomic.get_table(path, ["split", "record"])
    try:
        for split, data in zip(table["split"].to_pylist(), table["record"].to_pylist(), strict=True):
            found[split].append(msgspec.msgpack.decode(data, type=Task))
    except (KeyError, msgspec.DecodeError) as error:
        raise CorruptRecord(f"{path}: not the tasks of a run: {error}") from error
    return found
