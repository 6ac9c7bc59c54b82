"""Start an evaluation, or continue one that exists."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from hpc_swe.base import tables
from hpc_swe.base.errors import ConfigError, DeadlineError
from hpc_swe.base.rundir import RunDir
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import checks, control, existing, submit
from hpc_swe.launch.view import RunReader
from hpc_swe.launch.watch import left, watch
from hpc_swe.view.evaluation import results
from hpc_swe.view.evaluation.progress import ProgressBar, progress_of

OWN = ["mode=eval", "tasks.train=0", "eval.tasks=0"]


def configured(run: RunDir, words: Sequence[str]) -> RunConfig:
    """Return the configuration that the command line describes, or without words that of the existing run.

    In the latter case relative paths start where the run was started: the process goes to that folder.

    Raise ConfigError when the evaluation exists with another one, or when its model may be deleted.
    """
    if not words:
        config = existing.load(run, trains=True)
        if config.mode != "eval":
            raise ConfigError(
                f"{run.root} is a run of mode {config.mode}, not an evaluation; choose another --out"
            )
        existing.enter(run)
        return config
    if all("=" in word for word in words):
        raise ConfigError("no CONFIG.toml is given; name the files that configure tasks, agent and jobs")
    config = configuration.from_words([*words, *OWN])
    config = configuration.from_words([*words, *OWN, *without_routing(config)])
    changed = checks.differences(run, config) if run.config.exists() else []
    if changed:
        raise ConfigError(
            f"{run.root} is another evaluation: {'; '.join(changed)}. Name another folder with --out, or "
            "give only --out to continue that one"
        )
    if not run.config.exists():
        _require_permanent(Path(config.model))
        results.trained_on(Path(config.model), [])  # fails now, not after hours, if one is unreadable
    return config


def without_routing(config: RunConfig) -> list[str]:
    """Return the words that switch off what an engine returns for a learner alone."""
    return ["engine.return_routing=false"] if config.engine.return_routing else []


def _require_permanent(model: Path) -> None:
    """Refuse weights that a live run may delete.

    The copy that the message proposes keeps the files that say which tasks were trained. It has no folder of
    orders, which tells it from a run.
    """
    source = next(results.ancestry(model), None)
    if source and source.control.exists() and not source.finished.exists():
        copy, kept = f"{source.root}-{model.name}", (source.config, source.manifest, source.tasks)
        names = " ".join(path.name for path in kept)
        raise ConfigError(
            f"model = '{model}': {source.root} is still training and deletes old weights. Copy them first, "
            f"with the files that say which tasks they have seen: mkdir {copy} && (cd {source.root} && "
            f"cp -al --parents {names} weights/{model.name} {copy}); then --model {copy}/weights/{model.name}"
        )


def evaluate(run: RunDir, config: RunConfig, *, detach: bool, console: Console) -> bool:
    """Start or continue an evaluation and wait until it has finished; False when it continues unwatched."""
    if run.finished.exists() and (existing.is_copy(run) or not submit.tick(run, config).running):
        return True
    is_new = not run.config.exists()
    control.print_result(run, control.start(run, config))
    progress = ProgressBar(run, config, console)
    done = 0 if is_new else progress_of(RunReader(run, config).look()).done
    verb = "started" if is_new else "continued"
    tables.show(console, f"{run.root}: {verb}, {done} of {progress.total} episodes are done")
    if detach:
        return False
    try:
        with progress.bar:
            stop_on: Literal["error", "deadline"] = "error" if config.executor.is_here else "deadline"
            watch(run, config, float("inf"), progress.update, stop_on=stop_on)
            progress.end()
    except KeyboardInterrupt:
        here = "stopped; the same command continues from here"
        elsewhere = f"{left(run, config)}; the same command watches it again"
        tables.show(console, here if config.executor.is_here else elsewhere)
        raise
    except DeadlineError as error:
        reasons = RunReader(run, config).look().queue.failures or [progress.progress.waits_for]
        raise DeadlineError("; ".join([str(error), *reasons])) from None
    return True
