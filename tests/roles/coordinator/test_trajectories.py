"""A run on trajectories trains each of them once in a pass, however often its coordinator is killed."""

import itertools
from collections import Counter

import numpy as np
import pytest

from hpc_swe.base.metrics import Log
from hpc_swe.base.records import Batch, float_array, id_array, ids
from hpc_swe.base.store import atomic
from hpc_swe.base.store.parquet.trajectories import Trajectory
from hpc_swe.roles.coordinator.batching import batches
from hpc_swe.roles.coordinator.modes import sft
from tests.kit.coordinator_kit import learn, make_maintenance, published, rundir

COUNT, EPOCHS, SIZE = 7, 3, 4
STEPS = 6  # 21 samples in fours


def trajectory(number: int, split="train") -> Trajectory:
    """Known by its second token; the last two of its four have a loss."""
    return Trajectory(
        name=f"f: row {number}", split=split, token_ids=ids([1, 100 + number, 2, 3]), mask=b"\0\0\1\1"
    )


def make(run, epochs=EPOCHS, every=0, seed=3):
    """As jobs.coordinator does."""
    stream = sft.in_passes([trajectory(n) for n in range(COUNT)], seed, epochs)
    schedule = sft.SftSchedule(STEPS, SIZE, 16, 2, every)
    held_out = [sft.as_sample(trajectory(n, "eval")) for n in (50, 51, 52)]
    return sft.WarmStart(run, map(sft.as_sample, stream), schedule, Log(run.metric_log("c")), held_out)


def finish(run, **options):
    """A new coordinator for every batch but the first few, which are published at once."""
    for _ in range(STEPS + 2):
        make(run, **options).iterate(make_maintenance(run).snapshot())
        learn(run, STEPS)


def trained(run, step, name="rank_file") -> list[int]:
    """Numbers of the samples of a batch."""
    shares = [atomic.get(run.batch(step) / getattr(run, name)(rank), Batch) for rank in (0, 1)]
    micro = [m for share in shares for m in share.microbatches if any(m.mask)]
    return sorted(int(t) - 100 for m in micro for t in id_array(m.token_ids)[1::4])


def test_every_token_with_a_loss_weighs_alike_whatever_its_sample(run):
    """The loss of a batch is the mean over its tokens: long answers are not trained less than short ones."""
    answers = (1, 2, 5, 8)
    samples = [
        sft.as_sample(
            Trajectory(name=str(n), split="train", token_ids=ids([1] * (n + 1)), mask=b"\0" + b"\1" * n)
        )
        for n in answers
    ]
    schedule = sft.SftSchedule(1, len(samples), 16, 2)
    sft.WarmStart(run, iter(samples), schedule, Log(run.metric_log("c"))).iterate(
        make_maintenance(run).snapshot()
    )
    shares = [atomic.get(run.batch(0) / run.rank_file(rank), Batch) for rank in (0, 1)]
    micro = [m for share in shares for m in share.microbatches]
    weights = np.concatenate([float_array(m.weights) for m in micro])
    assert weights[weights > 0] == pytest.approx([1 / sum(answers)] * sum(answers))


def test_each_pass_trains_every_sample_once_in_its_own_order(run):
    finish(run)
    order = [number for step in range(STEPS) for number in trained(run, step)]
    assert Counter(order) == {number: EPOCHS for number in range(COUNT)}
    assert len(trained(run, STEPS - 1)) == EPOCHS * COUNT - (STEPS - 1) * SIZE  # the last batch is smaller
    items = list(sft.in_passes(range(COUNT), 3, EPOCHS))
    passes = [items[n * COUNT : (n + 1) * COUNT] for n in range(EPOCHS)]
    assert all(sorted(each) == list(range(COUNT)) for each in passes)
    assert len({tuple(each) for each in passes}) == EPOCHS
    endless = list(itertools.islice(sft.in_passes(range(COUNT), 3), EPOCHS * COUNT))
    assert endless == items
    assert items != list(sft.in_passes(range(COUNT), 4, EPOCHS))


@pytest.mark.parametrize("every", [0, 2])
def test_a_coordinator_killed_between_batches_publishes_the_same(tmp_path, every):
    whole, broken = rundir(tmp_path / "a"), rundir(tmp_path / "b")
    make(whole, every=every).iterate(make_maintenance(whole).snapshot())
    for step in range(STEPS):
        killed = make(broken, every=every)
        with pytest.raises(KeyboardInterrupt):
            _die_after(killed, step)
        assert batches.published_steps(broken) == list(range(step + 1))
    assert published(broken) == published(whole)
    assert len(published(whole)) == STEPS


def _die_after(mode, step):
    """End in the middle of an iteration, behind the rename of a batch."""

    class Dying:
        recent: dict[str, list[float]] = {}

        def write(self, number, values):
            if number == step:
                raise KeyboardInterrupt

    mode._log = Dying()
    mode.iterate(make_maintenance(mode._run).snapshot())


def test_held_out_samples_lie_beside_every_nth_batch_and_the_last(run):
    finish(run, every=2)
    with_validation = [s for s in range(STEPS) if (run.batch(s) / run.validation_file(0)).exists()]
    assert with_validation == [0, 2, 4, 5]
    for step in with_validation:
        assert trained(run, step, "validation_file") == [50, 51, 52]
        assert not {50, 51, 52} & set(trained(run, step))
    micro = [
        m for rank in (0, 1) for m in atomic.get(run.batch(4) / run.validation_file(rank), Batch).microbatches
    ]
    assert sum(float(w) for m in micro for w in memoryview(m.weights).cast("f")) == pytest.approx(1.0)
