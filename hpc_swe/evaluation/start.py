"""Start an evaluation, or go on with one that exists."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hpc_swe import config as configuration
from hpc_swe import tables
from hpc_swe.errors import ConfigError, DeadlineError
from hpc_swe.evaluation import results
from hpc_swe.evaluation.progress import ProgressBar, progress_of
from hpc_swe.rundir import RunDir
from hpc_swe.runs import control, existing
from hpc_swe.runs.view import RunReader
from hpc_swe.runs.watch import left, wait
from hpc_swe.settings import RunConfig

OWN = ["mode=eval", "tasks.train=0", "eval.tasks=0"]


def configured(run: RunDir, words: Sequence[str]) -> RunConfig:
    """The configuration that the command line describes, or that of the evaluation that is there.

    Raises:
        ConfigError: It is not that of the evaluation that is there, or its model may vanish.
    """
    if not words:
        config = existing.load(run)
        if config.mode != "eval":
            raise ConfigError(f"{run.root}: a run of mode {config.mode}, no evaluation; choose another --out")
        return config
    if all("=" in word for word in words):
        raise ConfigError("no CONFIG.toml; give the files that say which tasks, agent and jobs are meant")
    config = configuration.from_words([*words, *OWN])
    changed = control.differences(run, config) if run.config.exists() else []
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
    if run.finished.exists() and not control.alive(run, config):
        return True
    is_new = not run.config.exists()
    plan = control.start(run, config)
    control.tell(run, plan)
    watch = ProgressBar(run, config, console)
    done = progress_of(RunReader(run, config).look()).done
    begun = "begins" if is_new else f"goes on: {done} episodes are done"
    tables.show(console, f"{run.root}: {begun}, of {watch.total}")
    if detach:
        return False
    try:
        with watch.bar:
            wait(run, config, float("inf"), watch.look, detaches=True)
            watch.end()
    except KeyboardInterrupt:
        tables.show(console, _left(run, config))
        raise
    except DeadlineError as error:
        told = RunReader(run, config).look().queue.failures or [watch.progress.waits_for]
        raise DeadlineError("; ".join([str(error), *told])) from None
    return True


def _left(run: RunDir, config: RunConfig) -> str:
    if config.executor.is_here:
        return "stopped; the same command goes on from here"
    return f"{left(run, config)}; the same command goes on watching"
