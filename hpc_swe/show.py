"""python -m hpc_swe.show PATH: any file or folder of a run; with filters, its episodes as conversations.

show RUN                                     what the run holds
show RUN --task bugs-train-7                 conversations, the newest step first
show RUN --outcome unresolved --step 12      those of one step; of an evaluation by its label
show RUN/archive/episodes/step_000012.parquet --exit context --json
"""

import argparse
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import get_args

import msgspec

from hpc_swe import cli, transcript
from hpc_swe.errors import CorruptRecord, HpcSweError, boundary
from hpc_swe.records import ExitStatus, Outcome, ScoredEpisode
from hpc_swe.rundir import RunDir
from hpc_swe.runs import exhibits
from hpc_swe.store import atomic


def episodes(path: Path, wanted: dict[str, str], step: str) -> Iterator[ScoredEpisode]:
    """Those of a table, or of all tables of a run, the newest first, and what no batch has consumed yet.

    `wanted` is column -> value; `step` the number of a batch or the label of an evaluation, or empty.
    """
    if not path.is_dir():
        yield from exhibits.records(path, wanted)
        return
    run = RunDir(path)
    if not run.config.exists():
        raise HpcSweError(f"{path}: no run.json, so it is no run; name a run's folder or a table of episodes")
    if not step:
        yield from _lying(run, wanted)
    for table in (*_tables(run.archives), *_tables(run.evals)):
        number = table.stem.removeprefix("step_")
        if not step or step == table.stem or (number.isdecimal() and step == str(int(number))):
            yield from exhibits.records(table, wanted)


def _tables(folder: Path) -> list[Path]:
    names = atomic.names(folder) if folder.is_dir() else []
    return [folder / name for name in sorted(names, reverse=True) if name.endswith(".parquet")]


def _lying(run: RunDir, wanted: dict[str, str]) -> Iterator[ScoredEpisode]:
    ready = run.scored / "ready"
    for name in atomic.names(ready) if ready.is_dir() else []:
        with suppress(FileNotFoundError, CorruptRecord):  # consumed meanwhile; the coordinator buries it
            scored = atomic.get(ready / name, ScoredEpisode)
            has = {
                "task_id": scored.episode.request.task_id,
                "outcome": scored.score.outcome,
                "exit_status": scored.episode.exit_status.value,
            }
            if wanted.items() <= has.items():
                yield scored


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpc_swe.show", description="Print any part of a run.")
    add = parser.add_argument
    add("path", type=Path, help="a run, or any file or folder of one")
    add("--task", help="episodes of this task only")
    add("--outcome", choices=get_args(Outcome), help="episodes with this outcome only")
    add("--exit", choices=[status.value for status in ExitStatus], help="episodes that ended so only")
    add("--step", default="", help="number of a batch, or label of an evaluation")
    add("--limit", type=int, default=20, help="most episodes; 0 is all")
    add("--json", action="store_true", help="one record of JSON a line, tokens and all")
    return parser


def shown(arguments: argparse.Namespace) -> Iterator[str]:
    """The parts of what is printed."""
    keys = {"task_id": arguments.task, "outcome": arguments.outcome, "exit_status": arguments.exit}
    wanted = {key: value for key, value in keys.items() if value}
    if not wanted and not arguments.step and not (arguments.json and arguments.path.is_dir()):
        yield exhibits.exhibit(arguments.path)
        return
    found = islice(episodes(arguments.path, wanted, arguments.step), arguments.limit or None)
    count = 0
    for scored in found:
        count += 1
        whole = msgspec.json.encode(exhibits.readable(scored)).decode() if arguments.json else ""
        yield whole or transcript.as_text(scored)
    if not count:
        raise HpcSweError(f"{arguments.path}: no such episode")
    if count == arguments.limit and not arguments.json:
        yield f"the first {count} only; --limit 0 shows all"


@cli.command
def main() -> None:
    """The command line."""
    arguments = cli.parse(_parser())
    parts = shown(arguments)
    while True:
        with boundary(HpcSweError, f"show {arguments.path}"):
            part = next(parts, None)
        if part is None:
            return
        print(part, flush=True)  # outside: a pager that is left is no error of the run


if __name__ == "__main__":
    main()
