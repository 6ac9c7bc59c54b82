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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from hpc_swe.errors import ConfigError
from hpc_swe.gpu_turns import LearnerTurn
from hpc_swe.plugins.policies.base import Learner, Objective
from hpc_swe.records import BatchManifest
from hpc_swe.roles.learner.batch_source import BatchSource, Order, read_batch
from hpc_swe.roles.learner.collective import on_all_ranks, on_rank_zero
from hpc_swe.roles.learner.publish import Publisher, Snapshots, take_incarnation
from hpc_swe.roles.learner.resting import rest
from hpc_swe.rundir import RunDir
from hpc_swe.store import skipped

OnStep = Callable[[int, int, dict[str, float]], None]
"""Receives the steps taken so far, the step that metrics belong to, and these metrics."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearnerPlan:
    """Set how many steps are taken, and when weights and checkpoints are published."""

    steps: int
    export_every: int
    checkpoint_every: int
    max_skipped: int
    """Batches in a row that may be skipped because a gradient was not finite."""
    writer: str
    """Owner name of rank 0, which manifests record."""
    turn: LearnerTurn | None = None
    """This rank's turn on its GPU, which the caller has taken. Engines get it while no batch is there."""
    snapshots: Snapshots = Snapshots()
    """Which versions of the weights are full."""


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
        LostRace: Another learner published the same version.
        ConfigError: More batches in a row were skipped, by this start or a former one, than the plan allows;
            or the weights are not finite.
    """
    _require_finite(run, learner, plan.max_skipped)
    incarnation = on_rank_zero(learner.ranks, lambda: take_incarnation(run))
    publisher = Publisher(run, learner, incarnation, plan.writer, plan.snapshots)
    publisher.restore()
    publisher.publish_weights()
    on_step(learner.step, learner.step, {})
    while learner.step < plan.steps:
        began = time.monotonic()
        decision, turn_metrics = _next(learner, source, plan.turn)
        if isinstance(decision, Order):
            if _obey(decision, publisher):
                return
            continue
        waited = time.monotonic() - began
        metrics = turn_metrics | _validate(run, learner, objective, decision)
        read = partial(read_batch, run, decision, run.rank_file(learner.ranks.data_rank))
        metrics |= learner.train(on_all_ranks(learner.ranks, read), objective)
        _enter_skip(run, learner, bool(metrics["policy/skipped"]), plan.max_skipped)
        if learner.step == plan.steps and (found := _validate(run, learner, objective, decision)):
            on_step(learner.step, learner.step, found)  # before anything says that the run is done
        published = time.monotonic()
        _publish_due(learner.step, plan, publisher)
        metrics["step_seconds/wait"] = waited
        metrics["step_seconds/publish"] = time.monotonic() - published
        metrics["rate/trained_tokens"] = metrics["policy/tokens"] / (time.monotonic() - began)
        on_step(learner.step, learner.step - 1, metrics)
    publisher.publish_weights()
    publisher.publish_checkpoint()


def _obey(order: Order, publisher: Publisher) -> bool:
    """Carry out an order, and return whether it ends the learner."""
    log.info("order %s", order.name)
    if order is Order.DRAIN:
        publisher.publish_checkpoint()
    if order is Order.REPUBLISH:
        publisher.republish_weights()
    return order is not Order.REPUBLISH


def _require_finite(run: RunDir, learner: Learner, limit: int) -> None:
    refusal = on_rank_zero(learner.ranks, lambda: skipped.refusal(run, limit))
    if refusal:
        raise ConfigError(refusal)


def _enter_skip(run: RunDir, learner: Learner, is_skipped: bool, limit: int) -> None:
    """Count the batch that was trained last, and keep it if it was skipped."""
    step = learner.step - 1
    on_rank_zero(learner.ranks, lambda: skipped.enter(run, step, is_skipped))
    if is_skipped:
        on_rank_zero(learner.ranks, lambda: _keep(run, step))
        _require_finite(run, learner, limit)


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


def _publish_due(step: int, plan: LearnerPlan, publisher: Publisher) -> None:
    if step % plan.export_every == 0:
        publisher.publish_weights()
    if step % plan.checkpoint_every == 0:
        publisher.publish_checkpoint()


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
    while True:
        decision = on_rank_zero(learner.ranks, lambda: source.wait(learner.step))
        if decision is not None:
            return decision


def _validate(
    run: RunDir, learner: Learner, objective: Objective, manifest: BatchManifest
) -> dict[str, float]:
    """Return metrics of a batch's held-out samples under the current weights; none without such samples."""
    name = run.validation_file(learner.ranks.data_rank)
    if name not in manifest.files:
        return {}
    held_out = on_all_ranks(learner.ranks, partial(read_batch, run, manifest, name))
    found = learner.evaluate(held_out, objective)
    return {f"validation/{curve.removeprefix('policy/')}": value for curve, value in found.items()}
