"""After which steps a learner saves a checkpoint, and what it reports of it."""

import os
import time

import msgspec
import pytest

from hpc_swe.base.records import Batch, BatchManifest, CheckpointManifest, CoordinatorState
from hpc_swe.base.store import folders
from hpc_swe.roles.learner.batch_source import Order
from hpc_swe.roles.learner.loop import WORTH, LearnerPlan, SaveClock, learn
from tests.kit.one_rank import OneRank

SAVING_S = 0.2


@pytest.mark.parametrize(
    ("step", "clock", "is_due"),
    [
        (20, SaveClock(every=10, every_s=0), False),  # a start
        (20, SaveClock(every=10, every_s=0, unsaved_s=1), True),
        (19, SaveClock(every=10, every_s=0, unsaved_s=1e9), False),
        (19, SaveClock(every=10, every_s=60, unsaved_s=59), False),
        (19, SaveClock(every=10, every_s=60, unsaved_s=60), True),
        (19, SaveClock(every=10, every_s=60, unsaved_s=60, saving_s=2), False),
        (19, SaveClock(every=10, every_s=60, unsaved_s=2 * WORTH, saving_s=2), True),
    ],
)
def test_a_checkpoint_comes_by_number_and_by_what_a_kill_would_cost(step, clock, is_due):
    assert clock.is_due(step) is is_due


class Slow(OneRank):
    """A learner on one rank that saves for a while."""

    def save(self, folder):
        time.sleep(SAVING_S)
        (folder / "step").write_text(str(self.step))

    def load(self, folder):
        self.step = int((folder / "step").read_text())


class Decisions:
    """Answer with batches, but with the orders first that are listed for a step."""

    def __init__(self, run, orders):
        self.run, self.orders = run, orders

    def wait(self, step):
        if self.orders.get(step):
            return self.orders[step].pop(0)
        return folders.manifest(self.run.batch(step), BatchManifest)


def trained(run, steps, orders, every, every_s=0.0):
    """Train until this step; return the metrics of each step."""
    told = []
    plan = LearnerPlan(steps, 1, every, every_s, max_skipped=1, writer="w")
    learn(run, Slow(), None, plan, Decisions(run, orders), lambda taken, step, metrics: told.append(metrics))
    return told[1:]


@pytest.fixture
def filled(run):
    for step in range(4):

        def fill(stage, step=step):
            data = msgspec.msgpack.encode(Batch(step=step, rank=0, microbatches=[]))
            files = {run.rank_file(0): folders.write(stage, run.rank_file(0), data)}
            after = CoordinatorState()
            return BatchManifest(
                writer="c", files=files, step=step, groups=[], closed=[], after=after, stats={}
            )

        folders.publish(run.batch(step), fill)
    return run


def test_a_start_knows_how_long_the_last_checkpoint_took(filled):
    """A job that is preempted often would save after each start, however long that takes."""
    trained(filled, 3, {1: [Order.DRAIN]}, every=100)
    saved = folders.manifest(filled.checkpoint(1, 1), CheckpointManifest)
    assert saved.saving_s >= SAVING_S
    trained(filled, 3, {}, every=100, every_s=1e-9)
    assert sorted(os.listdir(filled.checkpoints)) == ["step_000001-i01", "step_000003-i02"]
