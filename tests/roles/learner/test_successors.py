"""A learner that was frozen, and has a successor, changes nothing that the successor has written."""

import os
from contextlib import suppress
from functools import partial
from itertools import count

import pytest

from hpc_swe.base.errors import LostRace, NodeError
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import folders, skipped
from hpc_swe.roles.learner.loop import LearnerPlan, learn
from hpc_swe.roles.learner.publish import Publisher, Snapshots, take_incarnation
from tests.kit.crash import in_child, refuse
from tests.kit.one_rank import Batches, OneRank, publish_batch


class Frozen(OneRank):
    """A learner on one rank that stands still while it trains or exports."""

    def __init__(self, meanwhile):
        self.meanwhile = meanwhile

    def train(self, batch, objective):
        metrics = super().train(batch, objective)
        self.meanwhile()
        return metrics

    def export(self, folder, carrier):
        if self.step:
            raise FloatingPointError("x is not finite")
        return {}


def test_one_that_wakes_up_in_a_step_leaves_the_count_of_skipped_batches(run):
    """Its own batch was trained without a fault, and would take those of its successor off the list."""
    publish_batch(run, 0)

    def succeed():
        take_incarnation(run)
        skipped.enter(run, 0, True)

    plan = LearnerPlan(4, 1, 9, 0.0, max_skipped=1, writer="w")
    with pytest.raises(LostRace, match="a learner has started as 02, and this one is 01"):
        learn(run, Frozen(succeed), None, plan, Batches(run), lambda *_: None)
    assert skipped.read(run).steps == [0]


def test_one_whose_weights_are_not_finite_says_nothing_about_its_successor(run):
    learner = Frozen(None)
    old = Publisher(run, learner, take_incarnation(run), "w", Snapshots())
    learner.step, learner.export = (
        1,
        lambda folder, carrier: take_incarnation(run) and Frozen.export(learner, folder, carrier),
    )
    with pytest.raises(LostRace, match="a learner has started as 02, and this one is 01"):
        old.publish_weights()
    assert skipped.read(run).broken == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda old: skipped.enter(old._run, 0, True, old.check_newest),
        lambda old: skipped.refuse_weights(old._run, 3, "x is not finite", old.check_newest),
    ],
    ids=["a batch", "weights"],
)
def test_one_that_wakes_up_while_it_writes_replaces_no_count(tmp_path, write):
    """Its successor starts, and skips a batch, before each of its calls but the one that publishes."""
    for call in count():
        run = RunDir(tmp_path / str(call))
        run.make()
        old = Publisher(run, Frozen(None), take_incarnation(run), "w", Snapshots())
        code = in_child(_write_beside_a_successor, run, partial(write, old), call)
        if code == UNDISTURBED:
            break
        assert code == 0, f"call {call}: it has replaced what its successor wrote"
    assert call > 3


def _write_beside_a_successor(run, write, fatal):
    calls, others = count(), []

    def meet(call, path):
        if call == "os.rename" and not others:
            os._exit(UNDISTURBED)
        if next(calls) == fatal:
            others.append(take_incarnation(run))
            skipped.enter(run, 7, True)
        return 0

    refuse(run.root, meet)
    with suppress(LostRace, NodeError):
        write()
    os._exit(int(skipped.read(run).steps != [7] or skipped.read(run).broken > 0))


def test_one_that_publishes_again_takes_no_number_after_its_successor(tmp_path):
    """Its successor starts at each of its calls of the file system in turn."""
    for call in count():
        run = RunDir(tmp_path / str(call))
        run.make()
        old = Publisher(run, Frozen(None), take_incarnation(run), "w", Snapshots())
        code = in_child(_publish_again, run, old, call)
        if code == UNDISTURBED:
            break
        assert code == 0, f"call {call}: it has outdone its successor"
    assert call > 3


UNDISTURBED = 3


def _publish_again(run, publisher, fatal):
    calls, others = count(), []

    def meet(call, path):
        if next(calls) == fatal:
            others.append(take_incarnation(run))
        return 0

    refuse(run.root, meet)
    lost = False
    try:
        publisher.republish_weights()
    except LostRace:
        lost = True
    os._exit(UNDISTURBED if not others else int(not lost and others[0] < publisher._incarnation))


def test_a_folder_that_others_remove_is_not_published_without_its_files(tmp_path):
    """A rank has lost the one that commits, or the coordinator finds the folder to be of a dead process."""
    assert in_child(_commit_during_removal, tmp_path) == 0


def _commit_during_removal(folder):
    final = folder / "weights"
    stage = folders.staging(final)
    for name in "abc":
        (stage / name).write_text(name)

    def rename(call, path):
        if call == "os.remove" and stage.exists():
            os.rename(stage, final)
        return 0

    refuse(folder, rename)
    folders.discard(stage)
    os._exit(int(final.exists()))
