from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hpc_swe.base import records
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import EngineTime, Sample
from hpc_swe.roles.coordinator.batching.batch_metrics import of_engines, of_packing
from hpc_swe.roles.coordinator.batching.packing import cost, pack, pack_minibatches, token_weights
from tests.kit.made_episodes import array

AGGREGATES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]


def sample(length, name=0, every=2):
    mask = np.array([i % every == every - 1 for i in range(length)], np.uint8)
    return Sample(
        episode=f"train-000000-{name:02d}",
        token_ids=records.ids(range(1000 * name, 1000 * name + length)),
        mask=mask.tobytes(),
        logprobs=records.floats(-mask.astype(np.float32)),
        advantages=records.floats(mask * np.float32(name + 1)),
        versions=records.ids(mask.astype(np.int32) - 1),
    )


def test_a_sample_without_routing_is_routed_freely_beside_one_with():
    known = replace(sample(4), routing=b"abcdefgh")
    (batch,) = pack(0, [known, sample(2, 1)], [1.0, 1.0], 100, 1)
    assert batch.microbatches[0].routing == b"abcdefgh" + bytes([records.FREE]) * 4
    assert of_packing([batch], 100)["batch/unrouted"] == 1
    (batch,) = pack(0, [sample(4), sample(2, 1)], [1.0, 1.0], 100, 1)
    assert batch.microbatches[0].routing == b""
    assert "batch/unrouted" not in of_packing([batch], 100)


def test_parts_of_an_engines_time_are_shares_of_all_of_it():
    found = of_engines(EngineTime(prefill_s=1.0, decode_s=4.0, full_s=2.0, paused_s=2.0, idle_s=1.0))
    parts = {"prefill": 0.125, "decode": 0.5, "full": 0.25, "paused": 0.25, "idle": 0.125}
    assert found == {f"engines/{name}": share for name, share in parts.items()}
    assert of_engines(EngineTime()) == {}


def tokens(batches):
    """Every (id, trained, log-probability, advantage, weight), however they are packed."""
    return Counter(
        row
        for batch in batches
        for m in batch.microbatches
        for row in zip(
            records.id_array(m.token_ids).tolist(),
            m.mask_array.tolist(),
            array(m.logprobs).tolist(),
            array(m.advantages).tolist(),
            array(m.weights).tolist(),
            strict=True,
        )
        if len(m.sequence_lengths) > 1 or m.sequence_lengths != [2] or any(m.mask)
    )


lengths = st.lists(st.integers(3, 40), min_size=1, max_size=20)


@given(lengths, st.integers(40, 120), st.integers(1, 4))
def test_ranks_keep_step_within_the_budget(sizes, budget, ranks):
    batches = pack(7, [sample(size, i) for i, size in enumerate(sizes)], [1.0] * len(sizes), budget, ranks)
    assert [batch.rank for batch in batches] == list(range(ranks))
    assert len({len(batch.microbatches) for batch in batches}) == 1
    for m in (m for batch in batches for m in batch.microbatches):
        assert sum(m.sequence_lengths) == len(m.mask) <= budget
    assert batches == pack(7, [sample(s, i) for i, s in enumerate(sizes)], [1.0] * len(sizes), budget, ranks)


@given(st.lists(st.integers(3, 40), min_size=8, max_size=40), st.integers(1, 4))
def test_the_work_of_ranks_differs_by_less_than_one_microbatch(sizes, ranks):
    batches = pack(7, [sample(size, i) for i, size in enumerate(sizes)], [1.0] * len(sizes), 80, ranks)
    price = [[sum(map(cost, m.sequence_lengths)) for m in batch.microbatches] for batch in batches]
    totals = [sum(rank) for rank in price]
    assert max(totals) - min(totals) <= max(max(rank) for rank in price) + 1


def work(sizes):
    """The documented cost of sequences: attention of 24,576 tokens costs as much as all else."""
    return sum(size + size * size / 24_576 for size in sizes)


@pytest.mark.parametrize(
    "sizes", [[60_000] * 2 + [20_000] * 10, [60_000, 45_000, 45_000, 30_000, 30_000] + [20_000] * 8]
)
def test_long_sequences_are_balanced_by_their_squares_too(sizes):
    """The busiest rank has a tenth less to do than if each sequence went to the rank with fewest tokens."""
    budget, ranks = 120_000, 4
    by_tokens = [[] for _ in range(ranks)]
    for size in sizes:
        min(by_tokens, key=sum).append(size)
    batches = pack(7, [sample(size, i) for i, size in enumerate(sizes)], [1.0] * len(sizes), budget, ranks)
    ours = [[size for m in batch.microbatches for size in m.sequence_lengths] for batch in batches]
    assert sorted(sum(ours, [])) == sorted(sizes)
    assert max(map(sum, by_tokens)) <= budget
    assert max(map(work, ours)) < 0.9 * max(map(work, by_tokens))


def minibatches(batches):
    """The tokens of each optimizer step, as `tokens` returns them."""
    found = []
    for number, _ in enumerate(batches[0].minibatches or [1]):
        ends = [0, *np.cumsum(batches[0].minibatches or [len(batches[0].microbatches)])]
        start, end = ends[number : number + 2]
        found.append(
            tokens([replace(batch, microbatches=batch.microbatches[start:end]) for batch in batches])
        )
    return found


many = st.integers(1, 6)


@given(
    lengths, st.tuples(st.integers(40, 120), st.integers(1, 4)), st.tuples(st.integers(40, 120), many), many
)
def test_optimizer_steps_train_the_same_whatever_fits_a_microbatch(sizes, one, other, count):
    episodes = [[(sample(size, name), 1 / (name + 3))] for name, size in enumerate(sizes)]
    made = [pack_minibatches(7, episodes, budget, ranks, count) for budget, ranks in (one, other)]
    assert minibatches(made[0]) == minibatches(made[1])
    assert len(minibatches(made[0])) == min(count, len(sizes))
    assert sum(sum(part.values()) for part in minibatches(made[0])) == sum(sizes)
    assert all(batch.minibatches == made[0][0].minibatches for batch in made[0])


def test_the_mean_over_optimizer_steps_is_the_loss_of_the_batch():
    """Over many batches, as which episodes a step gets is drawn anew for each."""
    episodes = [[(sample(6, name), 1 / 7)] for name in range(7)]
    mean, batches = Counter(), 400
    for step in range(batches):
        for part in minibatches(pack_minibatches(step, episodes, 100, 2, 3)):
            for token, trained, *_, weight in part:
                mean[token] += trained * weight / 3 / batches
    assert [mean[1000 * name + 1] for name in range(7)] == pytest.approx([1 / 7] * 7, rel=0.05)


def test_a_batch_without_samples_still_has_a_microbatch_for_every_rank():
    batches = pack(0, [], [], 100, 3)
    assert [len(batch.microbatches) for batch in batches] == [1, 1, 1]
    assert not any(array(m.weights).any() for batch in batches for m in batch.microbatches)


def test_a_sample_over_the_budget_is_refused_by_name():
    with pytest.raises(ConfigError, match="microbatch_tokens = 40"):
        pack(0, [sample(41)], [1.0], 40, 1)


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token_mean", [0.1, 0.1, 0.1]),
        ("seq_mean_token_mean", [1 / 12, 1 / 6, 1 / 6]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("constant", [1 / 3072, 1 / 3072, 1 / 3072]),
    ],
)
def test_weights_hold_the_denominator_of_the_whole_step(aggregate, expected):
    assert token_weights([4, 2, 4], aggregate) == pytest.approx([expected[0], expected[1], expected[0]])


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_an_episode_without_trained_tokens_is_in_no_denominator(aggregate):
    with_it, without = token_weights([4, 0, 6], aggregate), token_weights([4, 6], aggregate)
    assert [with_it[0], with_it[2]] == without
    assert token_weights([0, 0], aggregate) == [0.0, 0.0]
