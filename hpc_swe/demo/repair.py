"""Measure what a model learns, with controls: python -m hpc_swe.demo.repair CONFIG... --model MODEL.

The stages are folders of one place: tasks are made if there are none, and chosen by the rate at which the
model solves them; the model is evaluated on held-out tasks, trained, and evaluated again. A stage that is
done is not repeated, so the same command continues after an interruption, and with another --seed or more
--controls it adds to what is there.
"""

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hpc_swe.base import cli, loader, tables
from hpc_swe.base.errors import ConfigError, DeadlineError, HpcSweError
from hpc_swe.base.records import Record, Sampling
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, weights
from hpc_swe.base.store.parquet import evals
from hpc_swe.base.tables import console, say
from hpc_swe.cluster.executors.base import FOREGROUND
from hpc_swe.cluster.processes import completed
from hpc_swe.config import config as configuration
from hpc_swe.config import job_counts
from hpc_swe.config.settings import RunConfig
from hpc_swe.demo import learned
from hpc_swe.demo.learned import ModelResult
from hpc_swe.demo.stages import newest, of_stage, watched
from hpc_swe.launch import checks, control, existing, trajectories
from hpc_swe.view.evaluation import results, start

DECODINGS = {"sampled": 1.0, "greedy": 0.0}
"""Label -> temperature; other settings are those of [sampling]."""
CONTROLS = ("shuffled", "rejection")
SHARES = {"train": 0.8, "eval": 0.1}
"""Of the tasks that make_bugs makes."""
MARGIN = 1.1  # splits are drawn by function, so their shares vary
COMMAND_S = 7 * 86400.0  # longest time of a command that makes files
NOTE_S = 10.0  # between two notes of the time that a stage took


class Spent(Record, frozen=True, kw_only=True):
    """Hold what a stage took, over all calls of the command."""

    seconds: float = 0.0
    gpu_seconds: float = 0.0


@dataclass
class Clock:
    """Note the time of one stage while it lasts, so that a kill loses little of it."""

    path: Path
    gpus: int = 0
    spent: Spent = field(init=False)
    _since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.spent = atomic.get(self.path, Spent) if self.path.exists() else Spent()

    def note(self, least_s: float = NOTE_S) -> None:
        """Write down the time since the last note, if it is at least so long."""
        passed_s = time.monotonic() - self._since
        if passed_s < least_s:
            return
        gpu_seconds = self.spent.gpu_seconds + self.gpus * passed_s
        self.spent = Spent(seconds=self.spent.seconds + passed_s, gpu_seconds=gpu_seconds)
        self._since += passed_s
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic.put(self.path, self.spent)


def held_gpus(config: RunConfig) -> int:
    """Count the GPUs that all jobs of a run hold together, as far as its executor knows them."""
    executor = config.executor
    grants = [(jobs, executor.gpu_grant(role)) for role, jobs in job_counts.desired(config).items()]
    counts = [jobs * grant.count for jobs, grant in grants if grant]
    return max(counts, default=0) if configuration.dump(config)["executor"].get("share_gpus") else sum(counts)


@dataclass(frozen=True)
class Repair:
    """Run the stages of one measurement in one folder."""

    root: Path
    words: Sequence[str]
    """Files and overrides of the configuration."""
    model: Path
    seed: int = 0
    steps: int = 0
    """Steps of GRPO; 0 is what the configuration says."""
    samples: int = 8
    """Samples of each held-out task."""
    rate: int = 8
    """Samples of each training task by which tasks are chosen; 0 keeps all tasks."""
    hours: float = math.inf
    """After so many hours the training of a model ends, and its newest weights count."""
    sources: Sequence[str] = ("stdlib",)
    library: Path | None = None
    """Standard library with its tests; None is that of this Python."""

    def config(self, *words: str, files: Sequence[str] = (), model: Path | None = None) -> RunConfig:
        """Return the configuration of a stage, whose jobs end with this command if they run here."""
        given = [*of_stage(self.words, files), f"model={_text(model or self.model)}", *words]
        return configuration.from_words(given)

    def stage(self, name: str, config: RunConfig, hours: float = math.inf) -> RunDir:
        """Run a stage to its end, or for so many hours in all, unless it is done; return its run folder."""
        run = RunDir((self.root / name).absolute())
        if run.finished.exists():
            config = trajectories.resolved(run, config, [])
            checks.require_alike(run, config)
            if config.mode == "eval" or config.steps <= existing.load(run).steps:
                return run
        clock = Clock(self._spent(name), held_gpus(config))
        left_s = 3600 * hours - clock.spent.seconds
        if left_s <= 0:
            return run
        try:
            control.start(run, config)
            watched(name, run, existing.load(run), left_s, clock.note)
        except DeadlineError:
            clock.note(0.0)
            if clock.spent.seconds < 3600 * hours:
                raise
            say(f"{name}: ended after {hours:g} hours of training; its newest weights count")
        finally:
            clock.note(0.0)
        return run

    def make_tasks(self) -> dict[str, Path]:
        """Return the files of rows by split; make them where both are absent, or not yet whole."""
        config = self.config()
        taskset = configuration.dump(config)["taskset"]
        files = {split: Path(taskset.get(split) or " ") for split in SHARES}
        folder, held_out = files["train"].parent, files["eval"]
        if held_out.is_file() and files["train"].is_file():
            return files
        if files != {"train": folder / "train.parquet", "eval": folder / "test.parquet"} or (
            files["train"].exists() and not (folder / "tried.jsonl").exists()
        ):
            raise ConfigError(
                f"[taskset] train = '{files['train']}', eval = '{held_out}': they are not both there; name "
                "files of rows, or FOLDER/train.parquet and FOLDER/test.parquet, which this command makes"
            )
        wanted = {"train": config.tasks.train, "eval": config.tasks.eval_from + config.tasks.eval}
        limit = math.ceil(MARGIN * max(wanted[split] / share for split, share in SHARES.items()))
        words = ["--statement=function", f"--limit={limit}", f"--out={folder}"]
        words += [f"--library={self.library}"] if self.library else []
        judges = [word for word in self.words if "=" not in word or word.startswith(("sandbox", "grader"))]
        self._call("make_bugs", *self.sources, "--config", *judges, *words)
        if not held_out.is_file():
            raise ConfigError(
                f"{held_out}: no held-out task was made; raise tasks.eval, or name more code by --sources"
            )
        return files

    def choose(self, rows: Path) -> Path:
        """Return the rows to train on: those that the model sometimes solves, unless all are kept.

        Raise ConfigError if they were chosen by another number of samples.
        """
        chosen, rated = self.root / "teaching.parquet", RunDir(self.root / "rate")
        if chosen.exists() and rated.config.exists():
            samples = existing.load(rated).eval.samples
            if samples != self.rate:
                raise ConfigError(
                    f"{chosen} was chosen with --rate {samples}, not {self.rate}: give that or another --out"
                )
        if not self.rate:
            return rows
        if not chosen.exists():
            count = self.config().tasks.train
            own = [f"tasks.eval={count}", "tasks.eval_from=0"]
            run = self.evaluation("rate", self.model, rows, *own, samples=self.rate, decodings=("sampled",))
            self._call("select_rows", str(run.root), str(rows), f"--out={chosen}")
        return chosen

    def evaluation(
        self, name: str, model: Path, rows: Path, *words: str, samples: int, decodings: Sequence[str]
    ) -> RunDir:
        """Evaluate a model on rows; return the run."""
        own = [f"taskset.eval={_text(rows)}", f"eval.samples={samples}", *start.OWN, *words]
        config = self.config(*own, *start.without_routing(self.config(*own, model=model)), model=model)
        longest = config.sampling.max_tokens
        made = {name: Sampling(temperature=DECODINGS[name], max_tokens=longest) for name in decodings}
        run = self.stage(name, replace(config, eval=replace(config.eval, decodings=made)))
        if not run.summary.exists():
            results.write(run, existing.load(run))
        return run

    def train(self, kind: str, rows: Path) -> RunDir:
        """Train the model with GRPO, or with a control instead; return the run."""
        answers = self.root / "rewarded.parquet"
        if kind == "rejection" and not answers.exists():
            rate = str(self.root / "rate")
            self._call("export_episodes", rate, f"--tasks={rows}", f"--out={answers}")
        return self.stage(f"{kind}-{self.seed}", self.config_of(kind, rows), self.hours)

    def config_of(self, kind: str, rows: Path) -> RunConfig:
        """Return the configuration of a training."""
        words = [f"seed={self.seed}", f"taskset.train={_text(rows)}"]
        if kind == "rejection":
            answers = _text(self.root / "rewarded.parquet")
            source = ["mode=sft", f"sft.trajectories=[{answers}]"]
            return self.config(*words, *source, files=["sft"])
        config = self.config(*words, *([f"steps={self.steps}"] if self.steps else []))
        if kind == "grpo":
            return config
        table = {"type": "shuffled", "of": configuration.dump(config)["advantage"]}
        return replace(config, advantage=loader.load("advantages", table))

    def evaluate(self, name: str, model: Path, rows: Path) -> None:
        """Evaluate a model on the held-out tasks, in both decodings."""
        self.evaluation(f"evals/{name}", model, rows, samples=self.samples, decodings=[*DECODINGS])

    def measured(self) -> list[ModelResult]:
        """Return what is known about each model whose evaluations are done, the base model first."""
        kinds = ("grpo", *CONTROLS)
        runs = [RunDir(path) for kind in kinds for path in sorted(self.root.glob(f"{kind}-*"))]
        versions = [(run, version) for run in runs if (version := weights.newest_full(run))]
        found = [(ModelResult("base"), "base")]
        for run, version in versions:
            hours = Clock(self._spent(run.root.name)).spent.gpu_seconds / 3600
            found.append((ModelResult(run.root.name, version.step, hours), f"{run.root.name}-{version.name}"))
        for one, name in found:
            path = RunDir(self.root / f"evals/{name}").eval_table("eval")
            for attempt in evals.read(path) if path.exists() else []:
                one.attempts.setdefault(attempt.sampling, []).append(attempt)
        return [one for one, _ in found if one.attempts]

    def cost(self) -> str:
        """Say what all stages took together."""
        spent = [Clock(path).spent for path in (self.root / "spent").rglob("*.json")]
        hours, gpu_hours = (
            sum(each) / 3600 for each in zip(*map(msgspec.structs.astuple, spent), strict=True)
        )
        return f"{hours:.2f} hours and {gpu_hours:.2f} GPU-hours in all stages together"

    def _spent(self, name: str) -> Path:
        return self.root / "spent" / f"{name}.json"

    def _call(self, module: str, *words: str) -> None:
        """Run a command that makes files; raise HpcSweError if it fails. It has said why."""
        clock = Clock(self._spent(module))
        try:
            done = completed(subprocess.Popen([sys.executable, "-m", f"hpc_swe.{module}", *words]), COMMAND_S)
        finally:
            clock.note(0.0)
        if done.returncode:
            raise HpcSweError(f"hpc_swe.{module} failed for the reason above; the same command tries again")


def _text(value: Path) -> str:
    return json.dumps(str(value.absolute()))


def run(repair: Repair, controls: Sequence[str]) -> None:
    """Run all stages in order, and show the result."""
    os.environ[FOREGROUND] = "1"
    files = repair.make_tasks()
    held_out = files["eval"]
    rows = repair.choose(files["train"])
    repair.evaluate("base", repair.model, held_out)
    for kind in ("grpo", *controls):
        trained = repair.train(kind, rows)
        model = newest(trained)
        repair.evaluate(f"{trained.root.name}-{model.name}", model, held_out)
    base, *others = repair.measured()
    tables.show(console, learned.table(base, others, learned.functions(held_out)))
    picture = repair.root / "curves.png"
    learned.draw([RunDir(repair.root / one.name) for one in others if "rejection" not in one.name], picture)
    say(f"curves of all runs: {picture}")
    say(repair.cost())


def _controls(text: str) -> list[str]:
    found = [each for each in text.split(",") if each]
    if unknown := [each for each in found if each not in CONTROLS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(CONTROLS)}")
    return found


def _parser() -> argparse.ArgumentParser:
    what = "Measure what a model learns: make tasks, evaluate, train, evaluate again, and show a table."
    examples = (
        "configs/repair_1b.toml --model MODEL",
        "configs/repair_1b.toml --model MODEL --seed 1 --controls shuffled,rejection",
    )
    parser = cli.parser("hpc_swe.demo.repair", what, *examples)
    add, count = parser.add_argument, cli.number(int, 1)
    add("config", nargs="+", help=cli.CONFIG)
    add("--model", type=cli.folder, required=True, help="Hugging Face folder of the model")
    add("--out", type=cli.folder, help="folder of the stages (default: runs/, named by the first file)")
    sources = "code that tasks are made of, if there are none (default: stdlib)"
    add("--sources", nargs="+", default=["stdlib"], help=sources)
    add("--library", type=cli.folder, help="standard library with its tests (default: this interpreter's)")
    add("--seed", type=int, default=0, help="decides the order of the tasks in training")
    add("--steps", type=count, default=0, help="steps of GRPO (default: those of the configuration)")
    add("--samples", type=count, default=8, help="answers to each held-out task at temperature 1")
    rate = "answers to each training task, of which 0.1 to 0.9 must be right; 0 trains on all tasks"
    add("--rate", type=cli.number(int, 0), default=8, metavar="N", help=rate)
    hours = "end each training after so many hours, and evaluate its newest weights (default: no limit)"
    add("--hours", type=cli.number(float, 0.0), default=math.inf, help=hours)
    controls = f"train these controls, too, separated by commas: {', '.join(CONTROLS)}"
    add("--controls", type=_controls, default=[], metavar="LIST", help=controls)
    return parser


@cli.command
def main() -> None:
    """Run what the command line describes."""
    os.umask(0o077)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    given = cli.parse(_parser())
    files = [Path(word) for word in given.config if "=" not in word]
    if not files:
        raise ConfigError("no CONFIG.toml is given; name one, such as configs/repair_1b.toml")
    if "rejection" in given.controls and not given.rate:
        raise ConfigError("--controls rejection trains on the answers that --rate samples; it must not be 0")
    root = given.out or Path(os.environ.get("HPC_SWE_RUNS") or "runs").absolute() / files[0].stem
    options = given.seed, given.steps, given.samples, given.rate, given.hours
    try:
        repair = Repair(root, given.config, given.model, *options, given.sources, given.library)
        run(repair, given.controls)
    except KeyboardInterrupt:
        say("stopped; the same command continues from here")
        raise


if __name__ == "__main__":
    main()
