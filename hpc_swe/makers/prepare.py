"""Check rows and write them to one file: python -m hpc_swe.prepare SOURCE --out FILE.

The rows are those of SWE-bench, or programs with tests. A task is made of every row as in a run, so that all
faults of a dataset are reported here at once, and not on a compute node. The columns of SWE-bench are not
changed; one that holds an object without any key is left out. Published sets of programs in other columns
become rows of files.
"""

import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hpc_swe.base import cli, loader, tables
from hpc_swe.base.errors import ConfigError, StorageError, boundary
from hpc_swe.base.tables import console, say
from hpc_swe.tasks.published_rows import published_set, read_row
from hpc_swe.tasks.recipes import RECIPES
from hpc_swe.tasks.sets.base import ReadsRows
from hpc_swe.tasks.swebench_rows import (
    Record,
    TestPatch,
    columns,
    read_ids,
    read_records,
    test_plan,
)

if TYPE_CHECKING:
    from pyarrow import DataType

_OF_SWEBENCH = {"instance_id", "repo", "base_commit", "test_patch"}
"""Columns of which rows of SWE-bench have at least one, and programs none."""
_NAMES = re.compile(r"^.*?(?::\d+|: row \d+): |[\w.-]*__[\w.-]*")
"""A row's place, and ids of instances."""
_FEW = 3
"""So many rows with the same fault are each named."""
WORKDIR, TIMEOUT_S = "/testbed", 900.0
"""Values for the plan of tests that is only made to find faults of a row."""


@dataclass(frozen=True)
class Prepared:
    """Hold a row that a run can use."""

    repo: str
    """Repository, or name of the published set."""
    version: str
    tests: str
    """Name of the source of the command that runs its tests."""
    columns: dict[str, Any]


def records(source: str, split: str, revision: str | None) -> Iterable[tuple[str, Record]]:
    """Yield each row with its place: from a file, a folder that datasets saved, or a hub.

    Raise ConfigError if the source does not exist or cannot be reached.
    """
    path = Path(source)
    if path.is_file() or path.suffix in (".jsonl", ".json", ".parquet"):
        return read_records(path)
    if not path.is_dir() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ConfigError(f"{source}: there is no such file or folder")
    return _of_datasets(source, split, revision)


def _of_datasets(source: str, split: str, revision: str | None) -> Iterator[tuple[str, Record]]:
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ModuleNotFoundError:
        raise ConfigError(f"{source}: this needs the package datasets: pip install datasets") from None
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # else it logs each retry twice
    is_saved = any(Path(source, name).exists() for name in ("state.json", "dataset_dict.json"))
    try:
        if is_saved:
            rows = datasets.load_from_disk(source)
            if isinstance(rows, datasets.DatasetDict):
                if split not in rows:
                    raise ConfigError(f"{source}: no split {split!r}, but {', '.join(rows)}: --split")
                rows = rows[split]
        else:
            rows = datasets.load_dataset(source, split=split, revision=revision)
    except (LookupError, OSError, TypeError, ValueError, RuntimeError, DatasetsError) as error:
        remedy = (
            "; if this machine does not reach the hub, run this where the network is, or copy the "
            "dataset's parquet file here and name that"
        )
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{source}: {what}{'' if Path(source).is_dir() else remedy}") from None
    for number, row in enumerate(rows, start=1):
        yield f"{source}[{split}]: row {number}", row


def prepare(
    found: Iterable[tuple[str, Record]], wanted: dict[str, str] | None
) -> tuple[list[Prepared], list[str]]:
    """Return the usable rows and all complaints.

    With `wanted` (id -> its place in a file) only those rows are checked and returned, in that order. An id
    is that of the row or of its task. Other rows are complained of only if a wanted id is missing.
    """
    programs: ReadsRows = loader.load("tasksets", {"type": "programs"})
    good: dict[str, Prepared] = {}
    seen: dict[str, str] = {}
    complaints: list[str] = []
    others: list[str] = []
    for where, record in found:
        ids = [where]  # rows without an id are never duplicates
        try:
            values = columns(record)
            is_program = not _OF_SWEBENCH & values.keys() and published_set(values) is None
            ids = _ids(values, is_program) + ids
            form, values = programs.row_of(where, values) if is_program else ("", values)
            ids = _ids(values, is_program) + ids
            row_id = next((one for one in ids if wanted is None or one in wanted), None)
            if row_id is None:
                continue
            if row_id in seen:
                raise ConfigError(f"{where}: {row_id} occurs twice: {seen[row_id]}")
            seen[row_id] = where
            made = Prepared(form, "", "pytest", values) if is_program else None
            good[row_id] = made or _prepared(where, record, values)
        except (ConfigError, ValueError) as error:  # msgspec raises the second at a line that is not JSON
            complaint = str(error) if isinstance(error, ConfigError) else f"{where}: {error}"
            asked_for = [where] if wanted is None else [one for one in ids if one in wanted]
            seen |= dict.fromkeys(asked_for, where)
            (complaints if asked_for else others).append(complaint)
    if wanted is None:
        return list(good.values()), complaints
    missing = [f"{place}: {one} is not a row" for one, place in wanted.items() if one not in seen]
    complaints += missing and [*others, *missing]
    return [good[row_id] for row_id in wanted if row_id in good], complaints


def grouped(complaints: Iterable[str]) -> list[str]:
    """Return all complaints, but of many rows with the same fault the first one alone, and their number."""
    faults = [(_NAMES.sub("", complaint), complaint) for complaint in complaints]
    alike = Counter(fault for fault, _ in faults)
    firsts = dict(reversed(faults))
    return [
        complaint if alike[fault] <= _FEW else f"{complaint} (and {alike[fault] - 1} more rows)"
        for fault, complaint in faults
        if alike[fault] <= _FEW or complaint is firsts[fault]
    ]


def _ids(values: dict[str, Any], is_program: bool) -> list[str]:
    given = values.get("task_id" if is_program else "instance_id")
    return [] if given is None else [str(given)]


def _prepared(where: str, record: Record, values: dict[str, Any]) -> Prepared:
    row, kind = read_row(where, record), published_set(values)
    if row.eval_script or row.recipe or row.repo in RECIPES:
        test_plan(where, row, {}, WORKDIR, TIMEOUT_S)
    else:
        TestPatch.read(where, row)
    how = "a known recipe" if row.repo in RECIPES else "needs a recipe"
    if kind:
        how = f"its columns, as of {kind.title}"
    return Prepared(row.repo, row.version, "its eval script" if row.eval_script else how, values)


def write(rows: list[Prepared], out: Path) -> None:
    """Write one parquet file, completely or not at all.

    Raise ConfigError if a column holds values of several types, StorageError if it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for one in rows for name in one.columns))
    made = {}
    for name in names:
        try:
            made[name] = pa.array([one.columns.get(name) for one in rows])
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise ConfigError(f"column {name} does not have one type in all rows: {error}") from None
        if _holds_nothing(made[name].type):  # parquet has no type for it
            del made[name]
            say(f"column {name} is left out: it holds an object without any key")
    table = pa.table(made)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with boundary(StorageError, f"write {out}"):
            out.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, temporary, compression="zstd")
            temporary.rename(out)
    finally:
        temporary.unlink(missing_ok=True)


def _holds_nothing(kind: "DataType") -> bool:
    """Return whether a type has, at any depth, an object without keys."""
    fields = [kind.field(index).type for index in range(kind.num_fields)]
    return (not fields and str(kind) == "struct<>") or any(map(_holds_nothing, fields))


def overview(rows: list[Prepared]) -> Table:
    """Return a table of the rows by repository."""
    shown = tables.table(("repository or set", "rows", "versions", "tests are run by"))
    shown.columns[1].justify = "right"
    versions = defaultdict[tuple[str, str], list[str]](list)
    for one in rows:
        versions[one.repo, one.tests].append(one.version)
    for (repo, tests), own in sorted(versions.items()):
        shown.add_row(repo, str(len(own)), " ".join(sorted({*own}, key=_as_numbers)), tests)
    return shown


def _as_numbers(version: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else 0, part) for part in version.split(".")]


@cli.command
def main() -> None:
    """Check the rows that the command line names, and write them."""
    examples = (
        "princeton-nlp/SWE-bench_Verified --out tasks/verified.parquet",
        "rows.jsonl --out tasks/mine.parquet",
        "KodCode/KodCode-V1 --split train --skip-bad --out tasks/kodcode.parquet",
    )
    parser = cli.parser("hpc_swe.prepare", "Check rows of tasks, and write them.", *examples)
    add = parser.add_argument
    add("source", help="name on a hub, .jsonl, .json, .parquet, or folder saved by datasets")
    add("--out", type=cli.path, required=True, help="parquet file to write")
    add("--split", default="test", help="part of a dataset of a hub or a folder; a file has none")
    add("--revision", help="revision of a dataset of a hub")
    add("--ids", type=cli.path, help="file of instance ids, one a line: take these, in this order")
    add("--skip-bad", action="store_true", help="leave out rows that cannot be used")
    arguments = cli.parse(parser)
    if arguments.out.suffix != ".parquet":
        raise ConfigError(f"--out {arguments.out}: the file's name must end in .parquet")
    wanted = read_ids(arguments.ids) if arguments.ids else None
    rows, complaints = prepare(records(arguments.source, arguments.split, arguments.revision), wanted)
    for complaint in grouped(complaints):
        say(complaint)
    if not rows or (complaints and not arguments.skip_bad):
        remedy = "correct them, leave them out with --ids, or pass --skip-bad"
        raise ConfigError(
            f"{len(complaints)} rows cannot be used: {remedy}" if complaints else "there are no rows"
        )
    write(rows, arguments.out)
    tables.show(console, overview(rows))
    say(f"{len(rows)} rows in {arguments.out} ({arguments.out.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
