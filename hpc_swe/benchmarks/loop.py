"""Compare whole loops: python -m hpc_swe.benchmarks.loop RUN RUN ..

It reads the metrics of runs that have trained, for example one with `groups.max_staleness` 0, an
asynchronous one and a hybrid one of the same tasks and model, and prints them side by side over equally many
samples. A sample is an episode that a batch has consumed, trained or not. The first step of each run is left
out, because it waits for engines to start.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.table import Table

from hpc_swe import cli, tables
from hpc_swe.errors import ConfigError
from hpc_swe.metrics import decode
from hpc_swe.records import MetricLine
from hpc_swe.rundir import RunDir
from hpc_swe.runs import existing
from hpc_swe.settings import RunConfig

WAIT, KINDS, PARTS = "step_seconds/wait", ("finished", "trained", "dropped"), 4
NUMBERS = (
    *("steps", "samples", "samples/s", "learner waits %", "trains %", "publishes %", "in engines"),
    *("stale mean", "stale max"),
    *(f"solve q{part}" for part in range(1, PARTS + 1)),
)


@dataclass(frozen=True)
class Step:
    """Hold one step of a run, with the metrics of coordinator and learner."""

    seconds: float
    """From the end of the step before to the end of this one; a restart of the learner counts."""
    values: Mapping[str, float]

    @property
    def samples(self) -> float:
        """Return how many episodes the step's batch consumed."""
        return self.of_deciles("finished")

    def of_deciles(self, kind: str) -> float:
        return sum(self.values.get(f"length/{kind}_d{decile}", 0.0) for decile in range(10))

    def weighted(self, name: str) -> float:
        """Return a mean over the step's samples, times their number."""
        return self.values.get(name, 0.0) * self.samples


def steps_of(lines: Sequence[MetricLine]) -> list[Step]:
    """Return the steps that a learner has ended, without the first; of a repeated step the later counts."""
    values: dict[int, dict[str, float]] = {}
    ends: dict[int, float] = {}
    for line in sorted(lines, key=lambda line: line.time):
        values.setdefault(line.step, {}).update(line.values)
        if WAIT in line.values:
            ends[line.step] = line.time
    order = sorted(ends)
    return [
        Step(max(0.0, ends[step] - ends[before]), values[step])
        for before, step in zip(order, order[1:], strict=False)
    ]


def first_samples(steps: Sequence[Step], samples: float) -> list[Step]:
    """Return the steps until so many samples have been consumed, at least."""
    found: list[Step] = []
    for step in steps:
        if found and sum(each.samples for each in found) >= samples:
            break
        found.append(step)
    return found


def solve_rates(steps: Sequence[Step]) -> list[float]:
    """Return the solve rate of each of PARTS equal parts of the samples, in their order."""
    total, seen = sum(step.samples for step in steps), 0.0
    parts: list[list[Step]] = [[] for _ in range(PARTS)]
    for step in steps:  # a step belongs to the part in which its middle lies
        parts[min(PARTS - 1, int(PARTS * (seen + step.samples / 2) / max(total, 1.0)))].append(step)
        seen += step.samples
    return [_mean(part, "solve/train") for part in parts]


def _mean(steps: Sequence[Step], name: str) -> float:
    """Return a metric's mean over the samples of steps; nan without samples."""
    samples = sum(step.samples for step in steps)
    return sum(step.weighted(name) for step in steps) / samples if samples else float("nan")


def figures(steps: Sequence[Step], engines: int) -> list[str]:
    """Return the cells of a run's row, in the order of NUMBERS."""
    seconds = max(sum(step.seconds for step in steps), 1e-9)
    samples = sum(step.samples for step in steps)

    def share(*parts: str) -> str:
        spent = sum(step.values.get(f"step_seconds/{part}", 0.0) for step in steps for part in parts)
        return f"{100 * spent / seconds:.1f}"

    in_engines = sum(step.weighted("seconds/engine") for step in steps) / seconds / max(1, engines)
    return [
        str(len(steps)),
        f"{samples:,.0f}",
        f"{samples / seconds:.3g}",
        share("wait"),
        share("reference", "forward", "backward", "optimizer"),
        share("publish"),
        f"{in_engines:.1f}",
        f"{fmean(step.values.get('staleness/mean', 0.0) for step in steps):.2f}",
        f"{max(step.values.get('staleness/max', 0.0) for step in steps):.0f}",
        *("-" if math.isnan(rate) else f"{rate:.3f}" for rate in solve_rates(steps)),
    ]


def mode(config: RunConfig) -> str:
    """Name the way in which a run trains and samples."""
    if config.hybrid:
        return "hybrid"
    staleness = config.groups.max_staleness
    return f"asynchronous, staleness {staleness}" if staleness else "synchronous"


def read(folder: Path) -> tuple[RunConfig, list[Step]]:
    """Return a run's configuration and steps; raise ConfigError for a run that has trained too little."""
    run = RunDir(folder)
    config = existing.load(run)
    lines = [line for path in sorted(run.metrics.glob("*.jsonl")) for line in decode(path.read_bytes())[0]]
    steps = steps_of(lines)
    if not sum(step.samples for step in steps):
        raise ConfigError(f"{folder}: the learner has not ended two steps with episodes; nothing to compare")
    return config, steps


def compare(runs: Mapping[str, tuple[RunConfig, list[Step]]]) -> list[Table]:
    """Return the table of rates, and the counts of episodes by decile of their length, shortest first."""
    least = min(sum(step.samples for step in steps) for _, steps in runs.values())
    rates = tables.table(("run", "mode"), NUMBERS)
    counts = tables.table(("run", "episodes"), tuple(f"d{decile}" for decile in range(10)))
    for name, (config, steps) in runs.items():
        chosen = first_samples(steps, least)
        rates.add_row(name, mode(config), *figures(chosen, config.counts.get("inference", 1)))
        for kind in KINDS:
            totals = [sum(s.values.get(f"length/{kind}_d{d}", 0.0) for s in chosen) for d in range(10)]
            counts.add_row(name, kind, *(f"{total:,.0f}" for total in totals))
    return [rates, counts]


@cli.command
def main() -> None:
    """Print the tables."""
    parser = cli.parser("benchmarks.loop", "Compare runs over equally many samples.")
    parser.add_argument("runs", nargs="+", type=cli.folder, metavar="RUN", help="folder of a run")
    arguments = cli.parse(parser)
    names = {folder: folder.name for folder in arguments.runs}
    if len(set(names.values())) < len(names):
        names = {folder: str(folder) for folder in names}
    rates, counts = compare({name: read(folder) for folder, name in names.items()})
    tables.show(tables.console, rates)
    tables.say("the rest of the learner's time is that of restarts, and of reading and checking batches")
    tables.say("in engines: mean number of episodes that wait for a completion at a time, for each engine")
    tables.say("solve q1..q4: share of resolved episodes in each quarter of the samples")
    tables.show(tables.console, counts)


if __name__ == "__main__":
    main()
