"""Turns batches into weights: one optimizer step a batch, in order of steps.

Consumes batches/step_n, and produces weights/, checkpoints/ and metrics. Waits for the coordinator's
next batch; DRAIN, STOP or a signal of the scheduler unblock it. All ranks run this loop in lockstep.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpc_swe.plugins.policies.base import Learner, Objective
from hpc_swe.roles.learner.accord import on_all_ranks, on_rank_zero
from hpc_swe.roles.learner.batch_source import BatchSource, NextBatch, Order, share
from hpc_swe.roles.learner.publish import Publisher, take_incarnation
from hpc_swe.rundir import RunDir

Tell = Callable[[int, dict[str, float]], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearnerPlan:
    """How far, and what is published when."""

    steps: int
    export_every: int
    checkpoint_every: int
    writer: str
    """Owner name of rank 0, for manifests."""


def learn(
    run: RunDir, learner: Learner, objective: Objective, plan: LearnerPlan, source: BatchSource, tell: Tell
) -> Order | None:
    """Train until the plan's last step (None) or an order, which is returned.

    `tell` hears, on every rank, each step taken and its metrics; first the step of the start, without any.

    Raises:
        DeadlineError: No batch came, although the coordinator lives.
        StorageError: The file system refused; what was published before stands.
        LostRace: Another learner published the same version.
        FloatingPointError: A step was not finite.
    """
    incarnation = on_rank_zero(learner.ranks, lambda: take_incarnation(run))
    publisher = Publisher(run, learner, incarnation, plan.writer)
    publisher.restore()
    publisher.weights()
    tell(learner.step, {})
    while learner.step < plan.steps:
        began = time.monotonic()
        upcoming = _next(learner, source)
        if upcoming.order is not Order.TRAIN:
            return _obey(upcoming.order, publisher)
        waited = time.monotonic() - began
        metrics = _step(run, learner, objective, upcoming)
        published = time.monotonic()
        if learner.step % plan.export_every == 0:
            publisher.weights()
        if learner.step % plan.checkpoint_every == 0:
            publisher.checkpoint()
        metrics["step_seconds/wait"] = waited
        metrics["step_seconds/publish"] = time.monotonic() - published
        metrics["rate/trained_tokens"] = metrics["policy/tokens"] / (time.monotonic() - began)
        tell(learner.step, metrics)
    publisher.weights()
    publisher.checkpoint()
    return None


def _next(learner: Learner, source: BatchSource) -> NextBatch:
    while True:
        upcoming = on_rank_zero(learner.ranks, lambda: source.look(learner.step))
        if upcoming.order is not Order.WAIT:
            return upcoming


def _obey(order: Order, publisher: Publisher) -> Order:
    log.info("order %s", order.name)
    if order is Order.DRAIN:
        publisher.checkpoint()
    return order


def _step(run: RunDir, learner: Learner, objective: Objective, upcoming: NextBatch) -> dict[str, float]:
    manifest = upcoming.manifest
    assert manifest is not None  # TRAIN comes with one
    batch = on_all_ranks(learner.ranks, lambda: share(run, manifest, learner.ranks.data_rank))
    return learner.train(batch, objective)
