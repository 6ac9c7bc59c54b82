"""Keep the tasks that teach a model: python -m hpc_swe.select_rows EVALUATION ROWS --out FILE.

A group in which all attempts fail, or all succeed, has no advantage to train on. So an evaluation of the
model on the training rows measures each task's pass rate, and this command keeps the rows between two rates,
with the rate, the number of samples, the checksum of the model and the date in columns of their own. Training
changes the rates, so the two commands can be repeated with a later model.
"""

import datetime
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from hpc_swe.base import cli, intervals, loader, tables
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import RunManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.base.store.parquet import evals
from hpc_swe.base.tables import console, say
from hpc_swe.tasks.sets.base import ReadsRows
from hpc_swe.tasks.swebench_rows import columns, read_records


@dataclass(frozen=True)
class Band:
    """Hold the pass rates that are kept, both ends included."""

    least: float
    most: float

    def verdict(self, outcomes: list[float] | None) -> str:
        """Return ``kept``, or why a task with these outcomes is left out."""
        if not outcomes:
            return "not measured"
        rate = sum(outcomes) / len(outcomes)
        if rate < self.least:
            return f"below {self.least:g}"
        return "kept" if rate <= self.most else f"above {self.most:g}"


def selected(
    rows: Iterable[tuple[str, dict[str, Any]]], outcomes: Mapping[str, list[float]], band: Band
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the verdict on each row, and the row with its pass rate and the number of samples.

    Args:
        rows: Task id and columns of each row.
        outcomes: Task id -> one number per episode, 1 where it was resolved; without infrastructure failures.
        band: Pass rates that are kept.
    """
    for task_id, row in rows:
        found = outcomes.get(task_id)
        rate = sum(found) / len(found) if found else None
        yield band.verdict(found), row | {"pass_rate": rate, "samples": len(found or ())}


def rows_with_id(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield task id and columns of each row of a file.

    Raise ConfigError if a row has no id, nor the columns of a published set.
    """
    programs: ReadsRows = loader.load("tasksets", {"type": "programs"})
    for where, record in read_records(path):
        row = columns(record)
        yield row.get("instance_id") or _task_id(programs, where, row), row


def _task_id(programs: ReadsRows, where: str, row: dict[str, Any]) -> str:
    """Return the id of a row's task; rows that only another taskset reads have it in their own column."""
    try:
        return str(programs.row_of(where, row)[1]["task_id"])
    except ConfigError:
        if not isinstance(row.get("task_id"), str):
            raise
    return str(row["task_id"])


def _measured(run: RunDir, decoding: str) -> dict[str, list[float]]:
    attempts = evals.read(run.eval_table("eval"))
    known = sorted({attempt.sampling for attempt in attempts})
    if decoding not in known:
        raise ConfigError(f"{run.root}: no decoding {decoding!r}; it has {', '.join(known)}: --decoding")
    return intervals.outcomes((one for one in attempts if one.outcome != "infra_error"), decoding)


def _overview(verdicts: Counter[str]) -> Table:
    shown = tables.table(("rows by pass rate",), ("count", "share"))
    for verdict, count in verdicts.most_common():
        shown.add_row(verdict, str(count), f"{count / verdicts.total():.0%}")
    return shown


@cli.command
def main() -> int:
    """Select the rows that the command line asks for."""
    os.umask(0o077)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    examples = ("evals/base tasks/bugs/train.parquet --out tasks/bugs/teaching.parquet",)
    what = "Keep the rows whose tasks a model sometimes solves, as an evaluation on them has measured."
    parser = cli.parser("hpc_swe.select_rows", what, *examples)
    add = parser.add_argument
    add("evaluation", type=cli.folder, help="folder of a finished evaluation whose taskset.eval are the rows")
    add("rows", type=cli.path, help="rows of tasks, .parquet or .jsonl")
    add("--out", type=cli.folder, required=True, help="the .parquet file that is written")
    add("--least", type=cli.number(float, 0.0, 1.0), default=0.1, help="lowest rate kept (default: 0.1)")
    add("--most", type=cli.number(float, 0.0, 1.0), default=0.9, help="highest rate kept (default: 0.9)")
    add("--decoding", default="sampled", help="decoding of the evaluation that counts (default: sampled)")
    arguments = cli.parse(parser)
    run = RunDir(arguments.evaluation)
    band = Band(arguments.least, arguments.most)
    about = {
        "measured_model": atomic.get(run.manifest, RunManifest).model_sha256,
        "measured_on": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    found = [*selected(rows_with_id(arguments.rows), _measured(run, arguments.decoding), band)]
    tables.show(console, _overview(Counter(verdict for verdict, _ in found)))
    kept = [row | about for verdict, row in found if verdict == "kept"]
    if not kept:
        say(f"no row is kept, and {arguments.out} is not written")
        return 1
    import pyarrow as pa

    atomic.put_table(arguments.out, pa.Table.from_pylist(kept), atomic.write_secret)
    say(f"{len(kept)} rows in {arguments.out}")
    return 0


if __name__ == "__main__":
    main()
