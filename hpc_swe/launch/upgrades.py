"""Say what a release trains otherwise than the older one that has made a run, and keep the defaults of that.

A run keeps a copy of the code that it was made with, and this file is part of it. So a change that the copy
does not name is new to the run.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_swe.base.rundir import SPOOLS, RunDir
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig, ShapingConfig
from hpc_swe.launch import existing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingChange:
    """Describe one thing that a release trains otherwise than the one before, and the runs concerned."""

    name: str
    """Never changed: older copies of this file are searched for it."""
    what: str
    concerns: Callable[[RunConfig], bool]
    voids: str = ""
    """Messages whose names begin so mean something else now."""


CHANGES = (
    TrainingChange(
        "minibatches of episodes",
        "learner.optimizer.minibatches divides the episodes of a batch, no longer its microbatches; batches "
        "that are published already are trained in one optimizer step",
        lambda config: config.learner.optimizer.minibatches > 1,
    ),
    TrainingChange(
        "weights of visits",
        "curriculum.reweight weights a group by 1 plus the visits that were passed over before it, no longer "
        "each group of a settled task by 1 + rest",
        lambda config: config.curriculum.reweight and config.curriculum.rest > 0,
    ),
    TrainingChange(
        "penalties of delivered turns",
        "the penalties of [shaping] no longer count replies that were lost with their connection",
        lambda config: config.shaping != ShapingConfig(),
    ),
    TrainingChange(
        "square of the log-ratio",
        "the loss has the term learner.loss.sampler_coefficient (log pi - log mu)^2, by default with 0.01",
        lambda config: config.mode == "grpo" and config.learner.loss.sampler_coefficient > 0,
    ),
    TrainingChange(
        "penalties without division",
        "the penalties of [shaping] enter advantages without division by the spread of the group, and a "
        "group whose rewards are equal has no signal, whatever its penalties are",
        lambda config: config.shaping != ShapingConfig(),
    ),
    TrainingChange(
        "limit of staleness",
        "groups with a token more than groups.max_staleness steps older than their batch are dropped",
        lambda config: config.mode == "grpo",
    ),
    TrainingChange(
        "evaluations by step",
        "evaluations are numbered by steps: one that is under way is dropped and not repeated. To keep it, "
        "let the old code finish it first",
        lambda config: config.mode == "grpo" and config.eval.every > 0,
        voids="eval-",
    ),
)


FORMER_DEFAULTS = (
    ("learner.optimizer.beta2", "", 0.95, 0.98),
    ("learner.optimizer.warmup_steps", "", 0, 10),
    ("groups.hard_max_staleness", "", 0, 8),
    ("grader.cheated_reward", "pytest", 0.0, -1.0),
    ("grader.cheated_reward", "swebench", -1.0, -2.0),
)
"""Key, the type of its table if that has one, its default in an older release, and today's.

Only keys that may not change in an existing run.
"""


def with_former_defaults(run: RunDir, config: RunConfig, words: Sequence[str] = ()) -> RunConfig:
    """Return the configuration with the defaults that an existing run was made with, and log which these are.

    The files and overrides of `words` would change what the run trains by leaving such a key out; one that
    they give stays. Raise what `existing.load` does for a run that trains.
    """
    if not (run.config.exists() and run.manifest.exists()):
        return config
    old, new = (configuration.dump(each) for each in (existing.load(run, trains=True), config))
    kept, given = [], configuration.given(words)
    for name, kind, former, today in FORMER_DEFAULTS:
        *tables, key = name.split(".")
        if configuration.at(given, (*tables, key)) is not None:
            continue
        if kind and configuration.at(new, (*tables, "type")) != kind:
            continue
        if [configuration.at(tree, (*tables, key)) for tree in (old, new)] == [former, today]:
            configuration.at(new, tables)[key] = former
            kept.append(f"{name} = {former} (today {today})")
    if kept:
        log.warning("%s keeps the defaults of the release that made it: %s", run.root, ", ".join(kept))
    return configuration.build(new, str(run.config)) if kept else config


def prepare(run: RunDir, config: RunConfig) -> None:
    """Log what this release does otherwise in a run than the run's code; remove what it would misread.

    No process of the run may be alive.
    """
    copies = [
        run.code / folder / "upgrades.py" for folder in ("hpc_swe/launch", "hpc_swe/runs")
    ]  # before 0.2
    known = "".join(copy.read_text(encoding="utf-8") for copy in copies if copy.exists())
    for change in CHANGES:
        if f'"{change.name}"' in known or not change.concerns(config):
            continue
        log.warning("%s: this release trains otherwise: %s", run.root, change.what)
        if change.voids:
            for path in (path for spool in SPOOLS for path in run.spool(spool).glob(f"*/{change.voids}*")):
                path.unlink()
