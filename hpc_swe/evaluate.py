"""python -m hpc_swe.evaluate CONFIG... --out FOLDER: what a model solves. See docs/evaluate.md.

An evaluation is a run of mode eval: its folder, jobs, claims and restarts are any run's. This is the person's
side of it: the words that make one, the bar while it lasts, and the results when it has finished.
"""

import argparse
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hpc_swe import cli, launch, results, tables
from hpc_swe import config as configuration
from hpc_swe.errors import ConfigError, DeadlineError, HpcSweError
from hpc_swe.rundir import RunDir
from hpc_swe.settings import RunConfig
from hpc_swe.status import Reader, View, duration
from hpc_swe.store import tasks

FLAGS = {
    "model": "model",
    "url": "inference.url",
    "samples": "eval.samples",
    "tasks": "tasks.eval",
    "history": "rollout.history",
}
"""Option -> the key that it is a short word for."""
OWN = ["mode=eval", "tasks.train=0", "eval.tasks=0"]


@dataclass(frozen=True)
class Headway:
    """How far an evaluation is, and what it waits for."""

    done: int
    """Episodes."""
    solved: int
    waits_for: str
    is_queued: bool
    """Jobs wait for the scheduler, which may take its time."""
    moved: object
    """Equal as long as nothing moves."""
    failed: int = 0
    """Episodes that infrastructure failed to the last."""


class Patience:
    """Ends a wait in which nothing moves for so long, unless jobs wait for the scheduler."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._moved: object = None
        self._since = clock()

    def look(self, headway: Headway) -> None:
        """Raises DeadlineError."""
        if headway.moved != self._moved or headway.is_queued:
            self._moved, self._since = headway.moved, self._clock()
        silent_s = self._clock() - self._since
        if silent_s > self._limit_s:
            raise DeadlineError(
                f"nothing moved for {duration(silent_s)} (coordinator.wait_s and rollout.episode_timeout_s); "
                f"it waits for {headway.waits_for}"
            )


class Watch:
    """The bar."""

    def __init__(self, run: RunDir, config: RunConfig, console: Console) -> None:
        self._reader, self._patience = Reader(run, config), Patience(_limit_s(config))
        told = TextColumn("{task.description}", markup=False)  # an error may hold brackets
        columns = (told, BarColumn(), MofNCompleteColumn())
        self.bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
        self.total = size(run, config)
        self._row = self.bar.add_task(run.root.name, total=self.total)
        self._first, self._began = -1, time.monotonic()
        self.headway = Headway(0, 0, "its jobs", True, None)

    def look(self) -> None:
        """Draw how it stands.

        Raises:
            DeadlineError: It has not moved for too long.
        """
        try:
            self.headway = headway(self._reader.look())
        except (HpcSweError, OSError) as error:  # a file half gone, or a file system away for a while
            waits_for = f"a look that does not fail: {error}"
            self.headway = replace(self.headway, waits_for=waits_for, is_queued=False)
        self._first = self.headway.done if self._first < 0 else self._first
        minutes = max(time.monotonic() - self._began, 1.0) / 60
        failed = f", {self.headway.failed} infra failures" if self.headway.failed else ""
        told = f"{self.headway.solved} solved{failed}, {(self.headway.done - self._first) / minutes:.1f}/min"
        waits = f"; {self.headway.waits_for}"[:60]
        self.bar.update(self._row, completed=self.headway.done, description=told + waits)
        self._patience.look(self.headway)

    def end(self) -> None:
        """It has finished."""
        self.bar.update(self._row, completed=self.total, description="finished")


def _limit_s(config: RunConfig) -> float:
    """The coordinator's patience begins anew with its process, and a last episode may take its whole time."""
    return config.coordinator.wait_s + config.rollout.episode_timeout_s


def headway(view: View) -> Headway:
    """What a look says."""
    report, queue = view.report, view.queue
    pending = [job for job in queue.jobs if job.state != "running"]
    recent = report.recent if report else {}
    names = ("done", "resolved", "infra")
    done, solved, failed = (int(recent.get(f"evaluation/{name}", [0.0])[-1]) for name in names)
    if queue.silence:
        waits_for = "the scheduler, which does not answer"
    elif queue.failures:
        waits_for = "; ".join(queue.failures)
    elif pending:
        roles = ", ".join(sorted({f"{job.role}: {job.reason}" for job in pending}))
        waits_for = f"{len(pending)} jobs in the queue ({roles})"
    elif report is None:
        waits_for = "the coordinator"
    elif not view.engines:
        waits_for = "an engine that serves"
    else:
        waits_for = "; ".join([report.waits_for, *report.errors[-1:]])
    moved = (done, report.spools if report else None, len(view.engines))
    return Headway(done, solved, waits_for, bool(pending or queue.silence), moved, failed)


def size(run: RunDir, config: RunConfig) -> int:
    """Episodes in all."""
    held_out = tasks.read(run.tasks)["eval"][: config.eval.tasks or None]
    return len(held_out) * len(config.eval.decodings) * config.eval.samples


def configured(run: RunDir, words: Sequence[str]) -> RunConfig:
    """The configuration that the command line describes, or that of the evaluation that is there.

    Raises:
        ConfigError: It is not that of the evaluation that is there, or its model may vanish.
    """
    if not words:
        config = launch.load(run)
        if config.mode != "eval":
            raise ConfigError(f"{run.root}: a run of mode {config.mode}, no evaluation; choose another --out")
        return config
    if all("=" in word for word in words):
        raise ConfigError("no CONFIG.toml; give the files that say which tasks, agent and jobs are meant")
    config = configuration.of_words([*words, *OWN])
    changed = launch.differences(run, config) if run.config.exists() else []
    if changed:
        raise ConfigError(
            f"{run.root} is another evaluation: {'; '.join(changed)}. Name another folder with --out, or say "
            "nothing but --out to go on with that one"
        )
    if not run.config.exists():
        _require_lasting(Path(config.model))
        results.trained_on(Path(config.model), [])  # whether its ancestors can be read: now, not after hours
    return config


def _require_lasting(model: Path) -> None:
    """A copy keeps what says what was trained, and has no folder for orders: nothing runs there."""
    source = next(results.ancestry(model), None)
    if source and source.control.exists() and not source.finished.exists():
        copy, kept = f"{source.root}-{model.name}", (source.config, source.manifest, source.tasks)
        names = " ".join(path.name for path in kept)
        raise ConfigError(
            f"model = '{model}': {source.root} still trains, and removes old weights. Copy them first, with "
            f"what says which tasks they have seen: mkdir {copy} && (cd {source.root} && "
            f"cp -al --parents {names} weights/{model.name} {copy}); then --model {copy}/weights/{model.name}"
        )


def evaluate(run: RunDir, config: RunConfig, *, detach: bool, console: Console) -> bool:
    """Start or go on, until it has finished; False when it is left to itself."""
    if run.finished.exists() and not launch.alive(run, config):
        return True
    is_new = not run.config.exists()
    plan = launch.start(run, config)
    launch.tell(run, plan)
    watch = Watch(run, config, console)
    done = headway(Reader(run, config).look()).done
    begun = "begins" if is_new else f"goes on: {done} episodes are done"
    tables.show(console, f"{run.root}: {begun}, of {watch.total}")
    if detach:
        return False
    try:
        with watch.bar:
            launch.wait(run, config, float("inf"), watch.look, detaches=True)
            watch.end()
    except KeyboardInterrupt:
        tables.show(console, _left(run, config))
        raise
    except DeadlineError as error:
        told = Reader(run, config).look().queue.failures or [watch.headway.waits_for]
        raise DeadlineError("; ".join([str(error), *told])) from None
    return True


def _left(run: RunDir, config: RunConfig) -> str:
    if config.executor.is_here:
        return "stopped; the same command goes on from here"
    return f"{launch.left(run, config)}; the same command goes on watching"


def finish(run: RunDir, config: RunConfig, console: Console) -> None:
    """Write the results and show them."""
    tables.show(console, *results.shown(results.write(run, config)))
    tables.show(console, f"results: {run.summary}, {run.results}, {run.predictions('*')}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpc_swe.evaluate", description="What a model solves.")
    add = parser.add_argument
    add("config", nargs="*", help="TOML files, merged left to right, and overrides; none to go on")
    add("--out", type=cli.folder, required=True, help="the evaluation's folder, a run folder")
    add("--model", type=cli.folder, help="Hugging Face folder, or a run's weights/v...")
    add("--url", help="an engine that serves it already, http://host:port; its key in VLLM_API_KEY")
    add("--samples", type=int, help="episodes a task and decoding")
    add("--tasks", type=int, help="held-out tasks, the first so many")
    add("--history", choices=("keep", "template"), help="how a conversation's past is rendered")
    add("--detach", action="store_true", help="submit and return")
    add("--dry-run", action="store_true", help="print configuration, batch scripts and costs; make nothing")
    add("--compare", type=cli.folder, help="folder of an earlier evaluation of the same tasks")
    add("--common", action="store_true", help="compare on the tasks that are in both")
    return parser


def _words(arguments: argparse.Namespace) -> list[str]:
    if arguments.model:
        arguments.model = arguments.model.resolve()  # a link may point elsewhere tomorrow
    given = {key: getattr(arguments, flag) for flag, key in FLAGS.items()}
    return [*arguments.config, *(f"{key}={value}" for key, value in given.items() if value is not None)]


def _run(run: RunDir, arguments: argparse.Namespace, console: Console) -> None:
    other = RunDir(arguments.compare) if arguments.compare else None
    before = results.read(other) if other else None  # now, not after hours
    config = configured(run, _words(arguments))
    if arguments.dry_run:
        launch.preview(run, config)
        return
    if not evaluate(run, config, detach=arguments.detach, console=console):
        console.print("the same command shows how it goes, and writes the results when it has finished")
        return
    finish(run, config, console)
    if before:
        found = results.compare(before, results.read(run), common=arguments.common)
        tables.show(console, *results.shown_beside(str(arguments.compare), found))


@cli.command
def main() -> None:
    """The command line."""
    os.umask(0o077)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    arguments = cli.parse(_parser())
    _run(RunDir(arguments.out), arguments, tables.screen())


if __name__ == "__main__":
    main()
