"""Turn batches into weights: take one optimizer step per batch, in order of steps.

consumes      batches/step_n
produces      weights/, checkpoints/ and metrics
waits for     the next batch of the coordinator
unblocked by  that batch, DRAIN, STOP, or a signal of the scheduler

All ranks run this loop in lockstep.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpc_swe.plugins.policies.base import Learner, Objective
from hpc_swe.roles.learner.batch_source import BatchSource, NextBatch, Order, read_batch
from hpc_swe.roles.learner.collective import on_all_ranks, on_rank_zero
from hpc_swe.roles.learner.publish import Publisher, take_incarnation
from hpc_swe.rundir import RunDir

OnStep = Callable[[int, dict[str, float]], None]
"""Receives the steps taken so far, and the metrics of the last one."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearnerPlan:
    """Set how many steps are taken, and when weights and checkpoints are published."""

    steps: int
    export_every: int
    checkpoint_every: int
    writer: str
    """Owner name of rank 0, which manifests record."""


def learn(
    run: RunDir,
    learner: Learner,
    objective: Objective,
    plan: LearnerPlan,
    source: BatchSource,
    on_step: OnStep,
) -> Order | None:
    """Train until the plan's last step, or until an order, which is returned.

    `on_step` is called on every rank after each step; and once at the start, without metrics.

    Raises:
        DeadlineError: No batch came, although the coordinator is alive.
        StorageError: The file system refused a write; what was published before stays valid.
        LostRace: Another learner published the same version.
        FloatingPointError: The loss or the gradient of a step was not finite.
    """
    incarnation = on_rank_zero(learner.ranks, lambda: take_incarnation(run))
    publisher = Publisher(run, learner, incarnation, plan.writer)
    publisher.restore()
    publisher.publish_weights()
    on_step(learner.step, {})
    while learner.step < plan.steps:
        began = time.monotonic()
        upcoming = _next(learner, source)
        if upcoming.order is not Order.TRAIN:
            return _obey(upcoming.order, publisher)
        waited = time.monotonic() - began
        metrics = _step(run, learner, objective, upcoming)
        published = time.monotonic()
        if learner.step % plan.export_every == 0:
            publisher.publish_weights()
        if learner.step % plan.checkpoint_every == 0:
            publisher.publish_checkpoint()
        metrics["step_seconds/wait"] = waited
        metrics["step_seconds/publish"] = time.monotonic() - published
        metrics["rate/trained_tokens"] = metrics["policy/tokens"] / (time.monotonic() - began)
        on_step(learner.step, metrics)
    publisher.publish_weights()
    publisher.publish_checkpoint()
    return None


def _next(learner: Learner, source: BatchSource) -> NextBatch:
    while True:
        upcoming = on_rank_zero(learner.ranks, lambda: source.wait(learner.step))
        if upcoming.order is not Order.WAIT:
            return upcoming


def _obey(order: Order, publisher: Publisher) -> Order:
    log.info("order %s", order.name)
    if order is Order.DRAIN:
        publisher.publish_checkpoint()
    return order


def _step(run: RunDir, learner: Learner, objective: Objective, upcoming: NextBatch) -> dict[str, float]:
    manifest = upcoming.manifest
    assert manifest is not None  # TRAIN always has one
    batch = on_all_ranks(learner.ranks, lambda: read_batch(run, manifest, learner.ranks.data_rank))
    return learner.train(batch, objective)
