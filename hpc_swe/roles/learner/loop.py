"""Turn batches into weights: train on one batch after another, in order of steps.

consumes      batches/step_n
produces      weights/, checkpoints/ and metrics
waits for     the next batch of the coordinator
unblocked by  that batch, DRAIN, STOP, or a signal of the scheduler

All ranks run this loop in lockstep.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Batch, BatchManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import skipped
from hpc_swe.cluster.gpu_turns import LearnerTurn
from hpc_swe.config.settings import StopConfig
from hpc_swe.models.policies.base import Learner, Objective
from hpc_swe.roles.learner import stop
from hpc_swe.roles.learner.batch_source import BatchSource, Order, read_batch
from hpc_swe.roles.learner.collective import on_all_ranks, on_rank_zero
from hpc_swe.roles.learner.idle_offload import rest
from hpc_swe.roles.learner.probe import FIRST_IDS
from hpc_swe.roles.learner.publish import Publisher, Snapshots, take_incarnation

WORTH = 50
"""A checkpoint that comes by time saves at least so many times the seconds that the last one took."""
OnStep = Callable[[int, int, dict[str, float]], None]
"""Receives the steps taken so far, the step that metrics belong to, and these metrics."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearnerPlan:
    """Set how many steps are taken, and when weights and checkpoints are published."""

    steps: int
    export_every: int
    checkpoint_every: int
    checkpoint_s: float
    max_skipped: int
    """Batches in a row that may be skipped because a gradient was not finite."""
    writer: str
    """Owner name of rank 0, which manifests record."""
    turn: LearnerTurn | None = None
    """This rank's turn on its GPU, which the caller has taken. Engines get it while no batch is there."""
    snapshots: Snapshots = Snapshots()
    """Which versions of the weights are full."""
    probe_ids: Sequence[int] = FIRST_IDS
    """The text that learner and engines score after each swap."""
    stop: StopConfig = StopConfig()
    """Signs that end the run early."""


@dataclass
class SaveClock:
    """Decide after which steps a checkpoint is saved: by their number, and by what a kill would cost."""

    every: int
    """Steps between two checkpoints."""
    every_s: float
    """Seconds of work after which one is saved at any step; 0 is never."""
    unsaved_s: float = 0.0
    """Seconds of work that a kill would cost now."""
    saving_s: float = 0.0
    """Seconds that the last checkpoint took."""

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint follows this step; by time it costs at most 1 / WORTH of the work."""
        is_worth_it = self.unsaved_s >= max(self.every_s, WORTH * self.saving_s)
        return self.unsaved_s > 0 and (step % self.every == 0 or (self.every_s > 0 and is_worth_it))


def learn(
    run: RunDir,
    learner: Learner,
    objective: Objective,
    plan: LearnerPlan,
    source: BatchSource,
    on_step: OnStep,
) -> None:
    """Train until the plan's last step, or until an order.

    Held-out samples of a batch are scored before its step, and those of the last batch after it, too.
    `on_step` is called on every rank after each step and the last scoring; and at the start, without metrics.

    Raises:
        DeadlineError: No batch came, although the coordinator is alive.
        StorageError: The file system refused a write; what was published before stays valid.
        LostRace: Another learner has started since, or has published the same version.
        ConfigError: More batches in a row were skipped, by this start or a former one, than the plan allows;
            or the weights are not finite.
    """
    _require_finite(run, learner, plan.max_skipped)
    incarnation = on_rank_zero(learner.ranks, lambda: take_incarnation(run))
    publisher = Publisher(run, learner, incarnation, plan.writer, plan.snapshots, plan.probe_ids)
    publisher.restore()
    publisher.publish_weights()
    on_step(learner.step, learner.step, {})
    clock, saved_s = SaveClock(plan.checkpoint_every, plan.checkpoint_s, saving_s=publisher.saving_s), 0.0
    while learner.step < plan.steps:
        began = time.monotonic()
        saved_s += _save_if_due(learner, publisher, clock)
        waiting = time.monotonic()
        decision, turn_metrics = _next(learner, source, plan.turn)
        if isinstance(decision, Order):
            if _obey(decision, publisher):
                return
            continue
        waited = time.monotonic() - waiting
        metrics, saved_s = {"step_seconds/checkpoint": saved_s, "step_seconds/wait": waited}, 0.0
        metrics |= turn_metrics | _train(run, learner, objective, decision)
        _enter(run, learner, publisher, plan, {**decision.stats, **metrics})
        if learner.step == plan.steps and (found := _validate(run, learner, objective, decision)):
            on_step(learner.step, learner.step, found)  # before anything says that the run is done
        published = time.monotonic()
        if learner.step % plan.export_every == 0:
            publisher.publish_weights()
        metrics["step_seconds/publish"] = time.monotonic() - published
        metrics["rate/trained_tokens"] = metrics["policy/tokens"] / (time.monotonic() - began)
        on_step(learner.step, learner.step - 1, metrics)  # first: a step that is saved is not trained again
        clock.unsaved_s += time.monotonic() - waiting - waited
    publisher.publish_last()


def _save_if_due(learner: Learner, publisher: Publisher[Learner], clock: SaveClock) -> float:
    """Return the seconds that it took."""
    began = time.monotonic()
    if on_rank_zero(learner.ranks, partial(clock.is_due, learner.step)):
        publisher.publish_checkpoint()
        clock.unsaved_s, clock.saving_s = 0.0, publisher.saving_s
    return time.monotonic() - began


def _obey(order: Order, publisher: Publisher[Learner]) -> bool:
    log.info("order %s", order.name)
    if order in (Order.DRAIN, Order.LEAVE):
        publisher.publish_checkpoint()
    if order is Order.REPUBLISH or (order is Order.DRAIN and publisher.ends_in_delta):
        publisher.republish_weights()
    return order is not Order.REPUBLISH


def _require_finite(run: RunDir, learner: Learner, limit: int) -> None:
    refusal = on_rank_zero(learner.ranks, lambda: skipped.refusal(run, limit))
    if refusal:
        raise ConfigError(refusal)


def _train(run: RunDir, learner: Learner, objective: Objective, manifest: BatchManifest) -> dict[str, float]:
    """Take the step of a batch, and return its metrics with those of its held-out samples before the step."""
    metrics = _validate(run, learner, objective, manifest)
    share = _read(run, learner, manifest, run.rank_file)
    return metrics | learner.train(share, objective)


def _read(run: RunDir, learner: Learner, manifest: BatchManifest, name_of: Callable[[int], str]) -> Batch:
    ranks = learner.ranks
    read = partial(read_batch, run, manifest, name_of, ranks.data_rank, ranks.data_size)
    return on_all_ranks(ranks, read)


def _enter(
    run: RunDir,
    learner: Learner,
    publisher: Publisher[Learner],
    plan: LearnerPlan,
    values: Mapping[str, float],
) -> None:
    """Count and keep a batch that was skipped; enter what the last one has shown of `[stop]`."""
    step, is_skipped = learner.step - 1, bool(values["policy/skipped"])
    publisher.require_newest()  # a successor counts in the same file
    on_rank_zero(learner.ranks, lambda: skipped.enter(run, step, is_skipped, publisher.check_newest))
    if is_skipped:
        on_rank_zero(learner.ranks, lambda: _keep(run, step))
        _require_finite(run, learner, plan.max_skipped)
    enter = partial(stop.enter, run, step, values, plan.stop, publisher.check_newest)
    if reason := on_rank_zero(learner.ranks, enter):
        log.warning("early end: %s", reason)


def _keep(run: RunDir, step: int) -> None:
    """Link the files of a batch to where retention does not delete them."""
    kept = run.skipped(step)
    log.warning("skipped batch %d: a gradient is not finite; kept in %s", step, kept)
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for path in run.batch(step).iterdir():
            with suppress(FileExistsError):
                os.link(path, kept / path.name)
    except OSError as error:
        log.warning("not kept: %s", error)  # only people look at it, so training goes on


def _next(
    learner: Learner, source: BatchSource, turn: LearnerTurn | None
) -> tuple[BatchManifest | Order, dict[str, float]]:
    """Return the next batch or order, and metrics of the turn that engines had on the GPUs, if they had one.

    The learner keeps its turn while batches are there already.
    """
    if turn is None:
        return _wait(learner, source), {}
    if decision := on_rank_zero(learner.ranks, lambda: source.look(learner.step)):
        return decision, {}
    return rest(learner, turn, lambda: _wait(learner, source))


def _wait(learner: Learner, source: BatchSource) -> BatchManifest | Order:
    while (decision := on_rank_zero(learner.ranks, lambda: source.wait(learner.step))) is None:
        pass  # the other ranks have had an answer before their broadcast timed out
    return decision


def _validate(
    run: RunDir, learner: Learner, objective: Objective, manifest: BatchManifest
) -> dict[str, float]:
    """Return metrics of a batch's held-out samples under the current weights; none without such samples."""
    if run.validation_file(0) not in manifest.files:
        return {}
    held_out = _read(run, learner, manifest, run.validation_file)
    found = learner.evaluate(held_out, objective)
    return {f"validation/{curve.removeprefix('policy/')}": value for curve, value in found.items()}
