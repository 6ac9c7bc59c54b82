"""What the learner's rank 0 decides from the run folder, and how ranks share a verdict."""

import os

import msgspec
import pytest

from hpc_swe.base import records
from hpc_swe.base.errors import CorruptRecord, DeadlineError, LostRace
from hpc_swe.base.records import FILLER, Batch, CheckpointManifest, FileInfo, MicroBatch, WeightVersion
from hpc_swe.base.store import atomic, checkpoints, folders, orders, weights
from hpc_swe.roles.learner.batch_source import SILENT_PULSES, BatchSource, Order, deal
from hpc_swe.roles.learner.collective import on_all_ranks, on_rank_zero
from hpc_swe.roles.learner.publish import Publisher, Snapshots, take_incarnation
from tests.kit.constants import status_report
from tests.kit.crash import in_child
from tests.kit.one_rank import OneRank, publish_batch


def beat(run, number):
    atomic.put(run.status, status_report(beat=number, waits_for="an engine"))


def test_the_next_batch_is_trained_and_no_other(run):
    publish_batch(run, 3)
    assert BatchSource(run, 60, 0.01).wait(3).step == 3


def test_a_folder_that_cannot_be_read_for_a_while_ends_no_learner(run):
    """Nor is anything taken for an order to end."""

    def look() -> None:
        source = BatchSource(run, 60, 0.01)
        if os.getuid() == 0:
            os.seteuid(65534)  # whom the mode concerns
        assert source.look(0) is None
        assert not orders.is_over(run)

    run.stop.touch()
    run.control.chmod(0)
    assert in_child(look) == 0
    run.control.chmod(0o700)
    assert orders.is_over(run)


def test_weights_that_no_engine_loads_are_published_once_more(run):
    atomic.put(run.refused, WeightVersion(step=3))
    source = BatchSource(run, 60, 0.01, pulse_s=0.05)
    assert source.wait(3) is Order.REPUBLISH
    assert source.wait(3) is None
    publish_batch(run, 3)
    assert source.wait(3).step == 3
    assert source.wait(4) is Order.REPUBLISH


def test_orders_come_before_batches_and_stop_before_drain(run):
    publish_batch(run, 0)
    source = BatchSource(run, 60, 0.01)
    run.drain.touch()
    assert source.wait(0) is Order.DRAIN
    run.stop.touch()
    assert source.wait(0) is Order.STOP


def test_a_finished_run_needs_no_learner_but_its_last_state(run):
    publish_batch(run, 0)
    run.finished.touch()
    for is_interrupted in (False, True):
        assert BatchSource(run, 60, 0.01, lambda is_so=is_interrupted: is_so).wait(0) is Order.DRAIN


def test_a_signal_of_the_scheduler_is_no_end_of_the_run(run):
    publish_batch(run, 0)
    assert BatchSource(run, 60, 0.01, lambda: True).wait(0) is Order.LEAVE


def test_a_pulse_ends_the_look_so_that_other_ranks_hear(run):
    assert BatchSource(run, 60, 0.01, pulse_s=0.05).wait(0) is None


def test_the_deadline_names_what_is_awaited_by_it_and_by_the_coordinator(run):
    source = BatchSource(run, 0.05, 0.01, pulse_s=0.02)
    for number in range(2):
        beat(run, number)
        assert source.wait(7) is None
    beat(run, 2)
    with pytest.raises(DeadlineError, match=r"no .*step_000007 .*waits for: an engine"):
        source.wait(7)


def test_a_coordinator_that_reports_seldom_is_alive_between_two_reports(run):
    source = BatchSource(run, 0.05, 0.01, pulse_s=0.01)
    beat(run, 0)
    for _ in range(5):
        assert source.wait(7) is None
    beat(run, 1)
    with pytest.raises(DeadlineError):
        source.wait(7)


def test_a_coordinator_that_dies_during_the_wait_stops_the_deadline(run, caplog):
    """It may be preempted, and queued for longer than that."""
    source = BatchSource(run, 0.05, 0.01, pulse_s=0.01)
    for number in range(2):
        beat(run, number)
        assert source.wait(0) is None
    for _ in range(SILENT_PULSES):
        assert source.wait(0) is None
    assert "waiting for step 0: the coordinator is silent for" in caplog.text


class Alone:
    """One rank that is told what the others said."""

    def __init__(self, rank, *heard):
        self.rank, self.size, self.data_rank, self.heard = rank, 2, rank, heard

    def broadcast(self, value):
        return self.heard[0] if self.heard else value

    def gather(self, value):
        return [value, *self.heard]


def test_what_rank_0_cannot_do_fails_on_every_rank():
    def fail():
        raise CorruptRecord("x")

    with pytest.raises(CorruptRecord):
        on_rank_zero(Alone(0), fail)
    with pytest.raises(CorruptRecord):
        on_rank_zero(Alone(1, (None, CorruptRecord("x"))), lambda: pytest.fail("rank 1 acted"))
    assert on_rank_zero(Alone(1, ("answer", None)), fail) == "answer"


def test_one_rank_that_fails_fails_all():
    assert on_all_ranks(Alone(0, None), lambda: 5) == 5
    with pytest.raises(CorruptRecord):
        on_all_ranks(Alone(0, CorruptRecord("rank 1")), lambda: 5)


def test_a_learner_without_checkpoint_starts_only_from_the_first_batch(run):
    run.checkpoint(5, 1).mkdir()
    manifest = CheckpointManifest(
        writer="l", files={"a": FileInfo(size=1, sha256="")}, step=5, incarnation=1, tensor_parallel=1
    )
    atomic.put(run.checkpoint(5, 1) / folders.NAME, manifest)  # and no file: it is damaged
    publisher = Publisher(run, OneRank(), 2, "writer", Snapshots())
    publisher.restore()
    publish_batch(run, 5)
    with pytest.raises(CorruptRecord, match=r"checkpoints: no checkpoint is intact.*step_000005 are gone"):
        publisher.restore()
    publish_batch(run, 0)
    publisher.restore()


def test_an_incarnation_is_never_taken_twice(run):
    assert [take_incarnation(run) for _ in range(3)] == [1, 2, 3]


def test_a_learner_that_has_a_successor_publishes_nothing_more(run):
    """Under a number of its own it would outdo its successor's weights."""
    for number in (1, 2):
        assert take_incarnation(run) == number
    old = Publisher(run, OneRank(), 1, "writer", Snapshots())
    for publication in (old.republish_weights, old.publish_checkpoint, old.publish_weights):
        with pytest.raises(LostRace, match="a learner has started as 02, and this one is 01"):
            publication()
    assert atomic.names(run.incarnations) == ["01", "02"]


class Writing(OneRank):
    """A learner during whose writing something happens."""

    def __init__(self, meanwhile):
        self.meanwhile = meanwhile

    def save(self, folder):
        (folder / "state").write_text("x")
        self.meanwhile()

    def export(self, folder, carrier):
        self.save(folder)
        return {}

    def load(self, folder):
        self.step = int((folder / "state").read_text() == "x")


@pytest.mark.parametrize("kind", ["weights", "checkpoint"])
def test_a_learner_whose_successor_starts_as_it_writes_publishes_nothing(run, kind):
    old = Publisher(run, Writing(lambda: take_incarnation(run)), take_incarnation(run), "w", Snapshots())
    with pytest.raises(LostRace, match="a learner has started as 02, and this one is 01"):
        old.publish_weights() if kind == "weights" else old.publish_checkpoint()
    assert [*run.weights.iterdir(), *run.checkpoints.iterdir()] == []


def test_the_checkpoint_of_a_frozen_learner_does_not_end_its_successor(run):
    def start(step):
        learner = Writing(lambda: None)
        learner.step = step
        return Publisher(run, learner, take_incarnation(run), "w", Snapshots())

    start(1).publish_last()
    assert checkpoints.is_trained(run, weights.newest(run), 1)
    start(1).publish_weights()
    assert not checkpoints.is_trained(run, weights.newest(run), 1), "its own checkpoint is yet to come"
    resumed = start(0)
    resumed.restore()
    resumed.publish_last()
    assert checkpoints.is_trained(run, weights.newest(run), 1)


def microbatch(number: int) -> MicroBatch:
    return msgspec.structs.replace(FILLER, token_ids=records.ids([number, number]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("minibatches", [[], [1, 2]])
def test_a_batch_is_dealt_to_other_ranks_with_each_microbatch_once(ranks, minibatches):
    """In its own optimizer step; ranks run equally many in each, for they meet in every one."""
    cut = [
        Batch(
            step=7,
            rank=r,
            microbatches=[microbatch(10 * n + r + 1) for n in range(3)],
            minibatches=minibatches,
        )
        for r in range(2)
    ]
    dealt = [deal(cut, rank, ranks) for rank in range(ranks)]
    assert [(share.step, share.rank) for share in dealt] == [(7, rank) for rank in range(ranks)]
    assert len({(len(share.microbatches), *share.minibatches) for share in dealt}) == 1
    for part, wanted in enumerate(({1, 2}, {11, 12, 21, 22}) if minibatches else ({1, 2, 11, 12, 21, 22},)):
        first = sum(dealt[0].minibatches[:part])
        last = first + dealt[0].minibatches[part] if minibatches else None
        found = [m for share in dealt for m in share.microbatches[first:last] if m != FILLER]
        numbers = [int(records.id_array(m.token_ids)[0]) for m in found]
        assert sorted(numbers) == sorted(wanted)
