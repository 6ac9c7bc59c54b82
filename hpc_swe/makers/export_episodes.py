"""Write rewarded episodes as rows to train on: python -m hpc_swe.export_episodes RUN... --out FILE.

This is the first half of rejection sampling; a run with `sft.trajectories` is the other half. Each
row is a conversation in chat form with the token ids that the policy sampled. They are trained as they are;
no text is tokenized again.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from hpc_swe.base import cli, tables
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Message, RunManifest, Sample, ScoredEpisode, id_array
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.base.tables import console, say
from hpc_swe.launch import existing, trajectories
from hpc_swe.makers.select_rows import rows_with_id
from hpc_swe.roles.coordinator import archive
from hpc_swe.roles.coordinator.batching.groups import failure_cause
from hpc_swe.roles.coordinator.batching.samples import make_samples
from hpc_swe.roles.coordinator.dispatch import stable_hash
from hpc_swe.view import exhibits

TEXT = pa.string()
FUNCTION = pa.struct([("name", TEXT), ("arguments", TEXT)])
CALL = pa.struct([("id", TEXT), ("type", TEXT), ("function", FUNCTION)])
MESSAGE = pa.struct(
    [("role", TEXT), ("content", TEXT), ("tool_call_id", TEXT), ("tool_calls", pa.list_(CALL))]
)
KINDS = {
    "reward": pa.float64(),
    "messages": pa.list_(MESSAGE),
    "enable_thinking": pa.bool_(),
    "token_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.uint8()),
}
COLUMNS = ("task_id", "run", "episode", "reward", "messages", "tools", "enable_thinking", "token_ids")
SCHEMA = pa.schema([(name, KINDS.get(name, TEXT)) for name in (*COLUMNS, "loss_mask", "tokenizer")])
Row = dict[str, object]


@dataclass
class Found:
    """Collect the rows of the best-hashed episodes of each task, and count what was read."""

    per_task: int
    """Most episodes of a task; 0 is all."""
    rows: dict[str, dict[tuple[int, str], list[Row]]] = field(default_factory=lambda: defaultdict(dict))
    """Task -> (hash, name of the episode) -> its rows."""
    read: int = 0
    rewarded: int = 0

    def add(self, task_id: str, name: str, rows: list[Row]) -> None:
        """Keep an episode's rows; of too many of a task, drop those that a hash of their names puts last."""
        kept = self.rows[task_id]
        kept[stable_hash(name), name] = rows
        if self.per_task and len(kept) > self.per_task:
            del kept[max(kept)]

    def ordered(self) -> list[Row]:
        """Return all rows, in order of tasks and episodes."""
        return [row for _, kept in sorted(self.rows.items()) for key in sorted(kept) for row in kept[key]]


class RunExport:
    """Make rows of one run's episodes."""

    def __init__(self, folder: Path) -> None:
        """Open the run; raise ConfigError if the folder is none, or its model's tokenizer is gone."""
        self.run, self.config = RunDir(folder), existing.load(RunDir(folder))
        self.run_id = atomic.get(self.run.manifest, RunManifest).run_id
        self._tokenizer = trajectories.tokenizer_digest(self.run)
        preface = self.config.agent.preface
        self._tools = preface.tools if preface else ""

    def episodes(self) -> Iterator[ScoredEpisode]:
        """Yield the training episodes, or those of the evaluation when the run is nothing else.

        The held-out episodes of a training run are left out: a model trained on them could not be evaluated.
        """
        folder = self.run.evals if self.config.mode == "eval" else self.run.archives
        for name in atomic.names(folder):
            if self.config.mode == "eval" or archive.NAME.fullmatch(name):
                yield from exhibits.records(folder / name, {})

    def rows(self, scored: ScoredEpisode) -> list[Row]:
        """Return a row for each token sequence that training would make of the episode."""
        made = make_samples(scored.episode, 1.0, self.config.batches.train_chains, 0)
        return [self._row(scored, sample) for sample in made.samples if any(sample.mask)]

    def _row(self, scored: ScoredEpisode, sample: Sample) -> Row:
        return {
            "task_id": scored.episode.request.task_id,
            "run": self.run_id,
            "episode": scored.episode.request.name,
            "reward": scored.score.reward,
            "messages": chat_form(scored.episode.messages),
            "tools": self._tools,
            "enable_thinking": self.config.rollout.template_arguments.get("enable_thinking"),
            "token_ids": id_array(sample.token_ids),
            "loss_mask": sample.mask_array,
            "tokenizer": self._tokenizer,
        }


def chat_form(messages: Iterable[Message]) -> list[Row]:
    """Return messages as OpenAI's API has them; a tool's answer gets the id of the call that it answers."""
    found: list[Row] = []
    unanswered: list[str] = []
    for number, message in enumerate(messages):
        row: Row = {"role": message.role, "content": message.content}
        if message.role == "tool" and unanswered:
            row["tool_call_id"] = unanswered.pop(0)
        elif message.role == "assistant":
            unanswered = [f"call_{number}_{index}" for index in range(len(message.tool_calls))]
        if message.tool_calls:
            row["tool_calls"] = [
                {
                    "id": f"call_{number}_{index}",
                    "type": "function",
                    "function": {"name": c.name, "arguments": c.arguments},
                }
                for index, c in enumerate(message.tool_calls)
            ]
        found.append(row)
    return found


def is_chosen(scored: ScoredEpisode, least: float) -> bool:
    """Return whether an episode is rewarded enough, and neither failed on infrastructure nor cheated."""
    if failure_cause(scored) or scored.score.outcome == "cheated":
        return False
    return scored.score.reward is not None and scored.score.reward >= least


def collect(exports: Iterable[RunExport], least: float, per_task: int) -> Found:
    """Return the rows of the chosen episodes of all runs."""
    found = Found(per_task)
    for export in exports:
        for scored in export.episodes():
            found.read += 1
            if is_chosen(scored, least):
                found.rewarded += 1
                request = scored.episode.request
                found.add(request.task_id, f"{export.run_id}/{request.name}", export.rows(scored))
    return found


def _write(path: Path, rows: list[Row]) -> None:
    made = pa.Table.from_pylist(rows, schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.put_table(path, made, atomic.write_secret)
    lengths, tasks = pc.list_value_length(made["token_ids"]), pc.count_distinct(made["task_id"])
    sums = [pc.sum(lengths), pc.sum(pc.list_flatten(made["loss_mask"])), pc.max(lengths)]
    table = tables.table([str(path)], ["rows", "tasks", "tokens", "with a loss", "longest"])
    table.add_row("", *(f"{number:,}" for number in (len(rows), *(each.as_py() for each in (tasks, *sums)))))
    tables.show(console, table)


def _parser() -> argparse.ArgumentParser:
    what = "Write the rewarded episodes of runs as rows to train on, with their token ids."
    example = "runs/mine --out rows.parquet --per-task 4"
    parser = cli.parser("hpc_swe.export_episodes", what, example)
    add = parser.add_argument
    add("runs", nargs="+", type=cli.folder, metavar="RUN", help="training run, or folder of an evaluation")
    add("--out", type=cli.path, required=True, help="parquet file to write")
    add("--min-reward", type=float, default=1.0, help="least reward of an episode")
    most = "most episodes of a task, drawn by a hash; 0 is all"
    add("--per-task", type=cli.number(int, 0), default=0, help=most)
    add("--tasks", type=cli.path, metavar="ROWS", help="only episodes of the tasks in this file of rows")
    return parser


@cli.command
def main() -> None:
    """Write the rows that the command line asks for."""
    arguments = cli.parse(_parser())
    out = arguments.out
    if out.suffix != ".parquet":
        raise ConfigError(f"--out {out}: the file's name must end in .parquet")
    found = collect(map(RunExport, arguments.runs), arguments.min_reward, arguments.per_task)
    say(f"{found.read:,} episodes read, {found.rewarded:,} with a reward of {arguments.min_reward:g} or more")
    if arguments.tasks:
        wanted = {task_id for task_id, _ in rows_with_id(arguments.tasks)}
        found.rows = {name: rows for name, rows in found.rows.items() if name in wanted}
    rows = found.ordered()
    if not rows:
        raise ConfigError(
            f"no row is left to write: {found.rewarded} of {found.read} episodes have such a reward, of "
            f"{len(found.rows)} tasks; lower --min-reward, or name other runs or --tasks"
        )
    _write(out, rows)


if __name__ == "__main__":
    main()
