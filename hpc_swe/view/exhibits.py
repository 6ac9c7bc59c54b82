"""Render each file and folder of a run as text for people."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from hpc_swe.base import cli
from hpc_swe.base.errors import CorruptRecord, HpcSweError
from hpc_swe.base.metrics import decode, meaning
from hpc_swe.base.records import Batch, Episode, RolloutRequest, ScoredEpisode, float_array, id_array
from hpc_swe.base.rundir import SPOOLS, RunDir
from hpc_swe.base.store import atomic, sharing
from hpc_swe.base.store.task_history import RunHistory
from hpc_swe.base.transcript import clean

KINDS: dict[str, Any] = {
    "requests": RolloutRequest,
    "episodes": Episode,
    "scored": ScoredEpisode,
    "batches": Batch,
    "history.msgpack": RunHistory,
}
FLOATS = ("logprobs", "advantages", "weights")
BYTES = ("mask", "routing")
MOST_ROWS, MOST_NAMES, MOST_TEXT, HEADER = 100, 20, 1 << 22, 1 << 24
EPISODE = ("task_id", "outcome", "exit_status")
"""Columns that every table of episodes has; archives and evaluations have their records, too."""


def readable(value: object, key: str = "") -> object:
    """Convert a record to builtins, with packed arrays as lists."""
    if isinstance(value, msgspec.Struct):
        return {name: readable(getattr(value, name), name) for name in value.__struct_fields__}
    if isinstance(value, bytes):
        if key in BYTES:
            return list(value)
        return (float_array(value) if key in FLOATS else id_array(value)).tolist()
    if isinstance(value, list | tuple):
        return [readable(item, key) for item in value]
    if isinstance(value, dict):
        return {name: readable(item) for name, item in value.items()}
    return value


def exhibit(path: Path) -> str:
    """Render any file or folder of a run; raise HpcSweError where it is damaged, OSError if unreadable."""
    if path.is_dir():
        return _folder(path)
    if path.name == RunDir.token.name:
        return "the bearer token of every engine route: a secret, so it is not shown"
    if path.parent.name == RunDir.control.name and not path.stat().st_size:
        return f"the order {path.name} stands; remove the file, or `launch start` the run, to cancel it"
    return _OF_SUFFIX.get(path.suffix, _other)(path)


def pretty(value: object) -> str:
    """Format a value as JSON of several lines."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _json(path: Path) -> str:
    try:
        return clean(msgspec.json.format(path.read_bytes(), indent=2).decode())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"{path}: no JSON: {error}") from None


def _lines(path: Path) -> str:
    """Render a metrics log as a table of its curves, and any other JSON lines one by one."""
    if path.parent.name != RunDir.metrics.name:
        return "\n".join(clean(line) for line in path.read_text(errors="replace").splitlines())
    last: dict[str, tuple[int, float, int]] = {}
    lines, torn = decode(path.read_bytes())
    for line in lines:
        for name, value in line.values.items():
            last[name] = (line.step, value, last.get(name, (0, 0.0, 0))[2] + 1)
    rows = [(name, *last[name], meaning(name)) for name in sorted(last)]
    found = [_table(("curve", "last step", "last", "points", "meaning"), rows)]
    return "\n".join([*found, f"{torn} lines cannot be read"] if torn else found)


def _parquet(path: Path) -> str:
    try:
        table = pq.ParquetFile(path)
        names = table.schema_arrow.names
        columns = [n for n in names if n not in ("record", "messages", "sampled_ids")]
        if set(EPISODE) <= set(names):
            wanted = ("group_id", "index", "task_id", "sampling", "outcome", "exit_status", "reward", "turns")
            columns = [n for n in (*wanted, "sampled_tokens") if n in names]
        rows = next(table.iter_batches(MOST_ROWS, columns=columns), None)
    except (pa.ArrowException, OSError) as error:
        raise CorruptRecord(f"{path}: no parquet table: {error}") from None
    found = [[_short(value) for value in row.values()] for row in (rows.to_pylist() if rows else [])]
    count = table.metadata.num_rows
    cut = f", the first {MOST_ROWS} of them" if count > MOST_ROWS else ""
    parts = [_table(columns, found), f"{count} rows{cut}"]
    if "record" in names and set(EPISODE) <= set(names):
        parts.append("conversations: the same command with --task, --outcome or --exit")
    return "\n".join(parts)


def _tensors(path: Path) -> str:
    """Render the header of a safetensors file: names, types and shapes."""
    with path.open("rb") as file:
        head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else HEADER + 1
        text = file.read(size) if size <= HEADER else b""
    try:
        found = json.loads(text)
        found.pop("__metadata__", None)
        rows = [(name, t["dtype"], "x".join(map(str, t["shape"]))) for name, t in found.items()]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptRecord(f"{path}: not a safetensors file: its header cannot be read") from None
    return "\n".join([_table(("tensor", "dtype", "shape"), rows), f"{len(rows)} tensors, {_bytes(path)}"])


def _other(path: Path) -> str:
    """Render a message of a spool, a batch, or a log; of any other binary file only its size."""
    kind = next((KINDS[part] for part in reversed(path.absolute().parts) if part in KINDS), None)
    if kind is not None and (path.suffix in ("", ".msgpack") or "~" in path.name):
        return pretty(readable(atomic.get(path, kind)))
    if ".tfevents." in path.name:
        return f"{_bytes(path)} of curves and texts: tensorboard --logdir {path.parent}"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_TEXT))  # a long log is cut at its beginning
        data = file.read()
    if b"\0" in data:
        return f"{_bytes(path)}, neither text nor a record of a run"
    return clean(data.decode(errors="replace"))


def _folder(path: Path) -> str:
    """Render a run, a published folder by its manifest, a spool by its states, or else the entries."""
    run = RunDir(path)
    if run.config.exists():
        return _run(run)
    manifest = path / "MANIFEST.json"
    if manifest.exists():
        return _published(path, manifest)
    states = [path / state for state in ("ready", "claimed", "dead")]
    if path.name in SPOOLS and all(state.is_dir() for state in states):
        return "\n\n".join(f"{path.name}/{state.name}: {_entries(state)}" for state in states)
    lacks = ": neither run.json, as in a run, nor MANIFEST.json, as in a folder of one"
    return _entries(path) + ("" if atomic.names(path) else lacks)


def _run(run: RunDir) -> str:
    folders = {"archived steps": run.archives, "evaluations": run.evals, "weight versions": run.weights}
    folders |= {"checkpoints": run.checkpoints, "batches": run.batches, "metrics logs": run.metrics}
    rows = []
    for name, at in folders.items():
        names = sharing.entries(at)
        rows.append((name, len(names), names[-1] if names else "", f"{at}"))
    parts = [_table(("what", "count", "newest", "folder"), rows)]
    parts.append(
        f"episodes: python -m hpc_swe.show {cli.quoted(run.root)} --task TASK, --outcome OUTCOME, --step N"
    )
    return "\n".join([*parts, f"its state: python -m hpc_swe.status {cli.quoted(run.root)}"])


def _published(path: Path, manifest: Path) -> str:
    try:
        found = json.loads(manifest.read_bytes())
        files, tensors = found.pop("files", {}), found.pop("tensors", {})
        rows = [(name, info["size"], info["sha256"][:16]) for name, info in files.items()]
        missing = [f"missing: {name}" for name in files if not (path / name).exists()]
        if isinstance(found.get("probe"), dict):
            found["probe"] = f"{len(found['probe']['token_ids'])} tokens"
        total = sum(info["size"] for info in files.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptRecord(f"{manifest}: no manifest: {error}") from None
    head = f"{path.name}: {len(files)} files, {total:,} bytes"
    head += f", {len(tensors)} tensors" if tensors else ""
    return "\n".join([head, clean(pretty(found)), _table(("file", "bytes", "sha256"), rows), *missing])


def _entries(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    more = [f".. and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    shown = [f"  {clean(n)}{'/' if (path / n).is_dir() else ''}" for n in names[:MOST_NAMES]]
    return "\n".join([f"{len(names)} entries", *shown, *more])


def _bytes(path: Path) -> str:
    return f"{path.stat().st_size:,} bytes"


def _short(value: object) -> object:
    if isinstance(value, list | dict):
        value = json.dumps(value, default=str)
    return value.partition("\n")[0][:60] if isinstance(value, str) else value


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Make columns as wide as their longest cell; a pager may scroll sideways."""
    cells = [[*head], *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else clean(str(value))


def records(path: Path, wanted: Mapping[str, str]) -> Iterator[ScoredEpisode]:
    """Read the episodes of a table whose columns have the wanted values, in the table's order."""
    try:
        if "record" not in pq.read_schema(path).names:
            raise HpcSweError(f"{path}: has no records of episodes")
        filters = [(name, "=", value) for name, value in wanted.items()] or None
        for data in pq.read_table(path, columns=["record"], filters=filters)["record"].to_pylist():
            if data:
                yield msgspec.msgpack.decode(data, type=ScoredEpisode)
    except (pa.ArrowException, OSError, msgspec.DecodeError) as error:
        raise CorruptRecord(f"{path}: not a table of episodes: {error}") from error


def unconsumed(run: RunDir) -> Iterator[ScoredEpisode]:
    """Read the scored episodes that no batch has consumed, in the order of their names."""
    ready = run.scored / "ready"
    for name in sharing.entries(ready):
        with suppress(FileNotFoundError, CorruptRecord):  # consumed just now; or the coordinator rejects it
            yield atomic.get(ready / name, ScoredEpisode)


_OF_SUFFIX: dict[str, Callable[[Path], str]] = {
    ".json": _json,
    ".jsonl": _lines,
    ".parquet": _parquet,
    ".safetensors": _tensors,
}
