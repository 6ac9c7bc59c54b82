"""After which steps a learner saves a checkpoint, and what it reports of it."""

import os
import time

import pytest

from hpc_swe.base.records import CheckpointManifest
from hpc_swe.base.store import folders
from hpc_swe.roles.learner.batch_source import Order
from hpc_swe.roles.learner.loop import WORTH, LearnerPlan, SaveClock, learn
from tests.kit.one_rank import Batches, OneRank, publish_batch

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


def train(run, every_s, orders):
    plan = LearnerPlan(3, 1, 100, every_s, max_skipped=1, writer="w")
    learn(run, Slow(), None, plan, Batches(run, orders), lambda *_: None)


def test_a_start_knows_how_long_the_last_checkpoint_took(run):
    """A job that is preempted often would save after each start, however long that takes."""
    for step in range(4):
        publish_batch(run, step)
    train(run, 0.0, {1: [Order.DRAIN]})
    saved = folders.manifest(run.checkpoint(1, 1), CheckpointManifest)
    assert saved.saving_s >= SAVING_S
    train(run, 1e-9, {})
    assert sorted(os.listdir(run.checkpoints)) == ["step_000001-i01", "step_000003-i02"]
