"""Compare whole loops: python -m hpc_swe.benchmarks.loop RUN RUN ..

It reads the metrics of runs that have trained, for example one with `groups.max_staleness` 0, an
asynchronous one and a hybrid one of the same tasks and model, and prints them side by side over equally many
samples. A sample is an episode that a batch has consumed, trained or not. The first step after each start of
a learner is left out, because it waits for engines. So are steps that are trained again, as many more as
`groups.max_staleness` says, whose batches were sampled meanwhile, and as many last ones, because nothing is
sampled any more while they are trained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rich.table import Table

from hpc_swe.base import cli, tables
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.metrics import decode
from hpc_swe.base.records import MetricLine
from hpc_swe.base.rundir import RunDir
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import existing

WAIT, PARTS = "step_seconds/wait", 4
TRAINS = ("reference", "forward", "backward", "optimizer")
STAGES = ("queue", "sandbox", "engine_queue", "prefill", "decode", "tools", "grading")
"""Parts of an episode, curves of seconds/."""
ENGINE = ("prefill", "decode", "full", "paused", "idle")
"""Parts of an engine's time, curves of engines/."""
TRAINED = "episodes/trained_tokens"
"""Absent from a step that trained no episode."""


@dataclass(frozen=True)
class Step:
    """Hold one step of a run, with the metrics of coordinator and learner."""

    seconds: float
    """From the end of the step before to the end of this one."""
    values: Mapping[str, float]

    @property
    def samples(self) -> float:
        """Return how many episodes the step's batch consumed."""
        return self.values.get("episodes/finished", 0.0)

    def weighted(self, name: str) -> float:
        """Return a mean over the step's samples, times their number."""
        return self.values.get(name, 0.0) * self.samples


def steps_of(logs: Sequence[Sequence[MetricLine]], ahead: int = 0) -> list[Step]:
    """Return the steps whose batches were sampled while a learner trained, from a run's logs in any order.

    A learner's log is that of one start. Steps that were trained before are left out, then the first one,
    which waits for engines, `ahead` more, and the last `ahead`.
    """
    of_batches: dict[int, dict[str, float]] = {}
    for line in sorted((line for log in logs for line in log), key=lambda line: line.time):
        of_batches.setdefault(line.step, {}).update({} if WAIT in line.values else line.values)
    steps: list[Step] = []
    trained = -1
    for log in sorted(filter(None, logs), key=lambda log: log[0].time):
        new = [line for line in log if WAIT in line.values and line.step > trained]
        ends = list(pairwise(new))
        steps += [
            Step(line.time - before.time, of_batches[line.step] | line.values)
            for before, line in ends[ahead : len(ends) - ahead]
        ]
        trained = max([trained, *(line.step for line in new)])
    return steps


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
    samples = sum(step.samples for step in steps)
    return sum(step.weighted(name) for step in steps) / samples if samples else float("nan")


@dataclass(frozen=True)
class Loop:
    """A run that has trained."""

    config: RunConfig
    steps: Sequence[Step]
    held_out: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Held-out solve rates in their order, by decoding."""

    @property
    def samples(self) -> float:
        return sum(step.samples for step in self.steps)

    @property
    def seconds(self) -> float:
        return max(sum(step.seconds for step in self.steps), 1e-9)

    @property
    def rate(self) -> float:
        """Return samples per second."""
        return self.samples / self.seconds

    def share(self, *parts: str) -> float:
        """Return the percentage of the time that the learner spent on parts of its steps."""
        spent = sum(step.values.get(f"step_seconds/{part}", 0.0) for step in self.steps for part in parts)
        return 100 * spent / self.seconds


def figures(loop: Loop) -> dict[str, str]:
    """Return what the metrics of a run say: name -> cell."""
    engines = max(1, loop.config.counts.get("inference", 1))
    ages = [step.values.get("staleness/mean", 0.0) for step in loop.steps]
    oldest = max(step.values.get("staleness/max", 0.0) for step in loop.steps)
    sampled = sum(step.weighted("episodes/tokens") for step in loop.steps)
    training = [step for step in loop.steps if TRAINED in step.values]
    prompts, cached = (_mean(loop.steps, f"episodes/{kind}_tokens") for kind in ("prompt", "cached"))
    cells = {
        "steps": str(len(loop.steps)),
        "samples": f"{loop.samples:,.0f}",
        "samples/s": f"{loop.rate:.3g}",
        "sampled tokens/s": f"{sampled / loop.seconds:,.0f}",
        "learner waits %": f"{loop.share('wait'):.1f}",
        "learner trains %": f"{loop.share(*TRAINS):.1f}",
        "learner publishes %": f"{loop.share('publish', 'checkpoint'):.1f}",
        "in engines": f"{sum(s.weighted('seconds/engine') for s in loop.steps) / loop.seconds / engines:.1f}",
        **{f"s in {stage}": f"{_mean(loop.steps, f'seconds/{stage}'):.3g}" for stage in STAGES},
        **{f"engine {part} %": f"{100 * _mean(loop.steps, f'engines/{part}'):.1f}" for part in ENGINE},
        "prompts cached %": f"{100 * cached / max(prompts, 1.0):.1f}",
        "tokens an episode": f"{_mean(loop.steps, 'episodes/tokens'):,.0f}",
        "tokens a trained one": f"{_mean(training, TRAINED):,.0f}",
        "stale mean": f"{fmean(ages):.2f}",
        "stale max": f"{oldest:.0f}",
    }
    rates = enumerate(solve_rates(loop.steps), start=1)
    cells |= {f"solve q{part}": "-" if math.isnan(rate) else f"{rate:.3f}" for part, rate in rates}
    for name, found in loop.held_out.items():
        cells[f"held-out {name}"] = f"{found[0]:.3f} to {found[-1]:.3f}"
    return cells


def mode(config: RunConfig) -> str:
    """Name the way in which a run trains and samples."""
    if config.hybrid:
        return "hybrid"
    staleness = config.groups.max_staleness
    return f"asynchronous, staleness {staleness}" if staleness else "synchronous"


def read(folder: Path) -> Loop:
    """Return a run's configuration and steps; raise ConfigError for a run that has trained too little."""
    run = RunDir(folder)
    config = existing.load(run)
    logs = [decode(path.read_bytes())[0] for path in sorted(run.metrics.glob("*.jsonl"))]
    steps = steps_of(logs, config.groups.max_staleness)
    if not sum(step.samples for step in steps):
        raise ConfigError(f"{folder}: the learner has ended too few steps with episodes; nothing to compare")
    held_out: dict[str, dict[int, float]] = {}
    for line in (line for log in logs for line in log):
        for name, value in line.values.items():
            if name.startswith("solve/eval/"):
                held_out.setdefault(name.removeprefix("solve/eval/"), {})[line.step] = value
    rates = {name: [of[step] for step in sorted(of)] for name, of in held_out.items()}
    return Loop(config, steps, rates)


def compare(loops: Mapping[str, Loop]) -> Table:
    """Return the table of what each run reached."""
    least = min(loop.samples for loop in loops.values())
    loops = {name: replace(loop, steps=first_samples(loop.steps, least)) for name, loop in loops.items()}
    columns = {name: figures(loop) for name, loop in loops.items()}
    best = max((loop.rate for loop in loops.values() if not loop.config.groups.max_staleness), default=0.0)
    for name, loop in loops.items() if best else ():
        columns[name]["times the best synchronous"] = f"{loop.rate / best:.2f}"
    rates = tables.table(("",), tuple(loops))
    rates.add_row("mode", *(mode(loop.config) for loop in loops.values()))
    for row in dict.fromkeys(row for cells in columns.values() for row in cells):
        rates.add_row(row, *(cells.get(row, "-") for cells in columns.values()))
    return rates


@cli.command
def main() -> None:
    """Print the table."""
    example = "runs/demo-0/grpo runs/demo-0/shuffled"
    parser = cli.parser("hpc_swe.benchmarks.loop", "Compare runs over equally many samples.", example)
    parser.add_argument("runs", nargs="+", type=cli.folder, metavar="RUN", help="folder of a run")
    arguments = cli.parse(parser)
    names = {folder: folder.name for folder in arguments.runs}
    if len(set(names.values())) < len(names):
        names = {folder: str(folder) for folder in names}
    loops = {name: read(folder) for folder, name in names.items()}
    tables.show(tables.console, compare(loops))
    tables.say("in engines: mean number of episodes that wait for a completion at a time, for each engine")
    tables.say("s in queue, sandbox, ..: seconds of an episode in spools, and in each stage of its work")
    tables.say("engine prefill %, decode %, ..: of its time; full: of decode, while requests wait for room")
    tables.say("solve q1..q4: share of resolved episodes in each quarter of the samples")


if __name__ == "__main__":
    main()
