"""Print any file or folder of a run; with filters, its episodes as conversations.

python -m hpc_swe.show RUN                   list what the run holds
show RUN --task bugs-train-7                 conversations about a task, the newest step first
show RUN --outcome unresolved --step 12      those of one step (a number) or one evaluation (its label)
show RUN/archive/episodes/step_000012.parquet --exit context --json
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import get_args

import msgspec

from hpc_swe.base import cli, transcript
from hpc_swe.base.errors import HpcSweError, boundary
from hpc_swe.base.records import ExitStatus, Outcome, ScoredEpisode
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.view import exhibits


def episodes(path: Path, wanted: dict[str, str], step: str) -> Iterator[ScoredEpisode]:
    """Yield the episodes of a table, or of a run: those not yet consumed by a batch, then the newest first.

    `wanted` is column -> value; `step` is the number of a batch, the label of an evaluation, or empty.
    """
    if not path.is_dir():
        yield from exhibits.records(path, wanted)
        return
    run = RunDir(path)
    if not run.config.exists():
        raise HpcSweError(f"{path} is not a run: it has no run.json; name a run or a table of episodes")
    if not step:
        yield from (each for each in exhibits.unconsumed(run) if wanted.items() <= _columns(each).items())
    for table in (*_tables(run.archives), *_tables(run.evals)):
        number = table.stem.removeprefix("step_")
        if not step or step == table.stem or (number.isdecimal() and step == str(int(number))):
            yield from exhibits.records(table, wanted)


def _tables(folder: Path) -> list[Path]:
    names = atomic.names(folder) if folder.is_dir() else []
    return [folder / name for name in sorted(names, reverse=True) if name.endswith(".parquet")]


def _columns(scored: ScoredEpisode) -> dict[str, str]:
    return {
        "task_id": scored.episode.request.task_id,
        "outcome": scored.score.outcome,
        "exit_status": scored.episode.exit_status.value,
    }


EXAMPLES = (
    "runs/demo-0/grpo",
    "runs/demo-0/grpo/tasks.parquet",
    "runs/demo-0/grpo --step 12 --outcome resolved --limit 2",
)


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("hpc_swe.show", "Print any part of a run.", *EXAMPLES)
    add = parser.add_argument
    add("path", type=cli.path, help="a run, or any file or folder of one")
    add("--task", help="print only episodes of this task")
    outcomes, exits = get_args(Outcome), [status.value for status in ExitStatus]
    only = f"print only episodes with this outcome: {', '.join(outcomes)}"
    add("--outcome", choices=outcomes, metavar="OUTCOME", help=only)
    only = f"print only episodes that ended this way: {', '.join(exits)}"
    add("--exit", choices=exits, metavar="STATUS", help=only)
    add("--step", default="", help="print only episodes of this step, or of this label of an evaluation")
    add("--limit", type=cli.number(int, 0), default=20, help="print at most N episodes; 0 is all")
    add("--json", action="store_true", help="print one JSON record per line, with all tokens")
    return parser


def parts(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the texts to print, one per episode or file; raise HpcSweError if no episode fits the filters."""
    keys = {"task_id": arguments.task, "outcome": arguments.outcome, "exit_status": arguments.exit}
    wanted = {key: value for key, value in keys.items() if value}
    if not arguments.path.exists():
        raise HpcSweError(f"{arguments.path}: no such file or folder; name a run, or what is in one")
    if not wanted and not arguments.step and not (arguments.json and arguments.path.is_dir()):
        yield exhibits.exhibit(arguments.path)
        return
    count = 0
    for scored in islice(episodes(arguments.path, wanted, arguments.step), arguments.limit or None):
        count += 1
        if arguments.json:
            yield msgspec.json.encode(exhibits.readable(scored)).decode()
        else:
            yield transcript.as_text(scored)
    if not count:
        raise HpcSweError(f"{arguments.path}: no episode fits the filters")
    if count == arguments.limit and not arguments.json:
        yield f"--limit {count} was reached; --limit 0 shows all episodes"


@cli.command
def main() -> None:
    """Print the parts one by one."""
    arguments = cli.parse(_parser())
    texts = parts(arguments)
    while True:
        with boundary(HpcSweError, f"show {arguments.path}"):
            text = next(texts, None)
        if text is None:
            return
        print(text, flush=True)  # outside the block: a closed pager is not an error of the run


if __name__ == "__main__":
    main()
