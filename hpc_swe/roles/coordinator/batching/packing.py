"""Pack samples into microbatches: every token once, with its weight, the work balanced over ranks.

The learner adds up weight times term and divides by nothing. Each weight contains the denominator of the
whole step, so the way in which samples are packed cannot change the gradient. Packing is deterministic. With
several optimizer steps a batch, the episodes are divided among these first, and each is packed by itself.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hpc_swe.base import records
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import FILLER, FREE, Batch, MicroBatch, Sample

Aggregate = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
# Number of tokens at which attention costs as much as the rest of a layer, for a hidden size of 2048. It only
# affects the balance, so it need not match the model.
ATTENTION_TOKENS = 24_576
CONSTANT_LENGTH = 1024  # tokens: it scales all gradients alike, and AdamW divides by their size


def token_weights(tokens: Sequence[int], aggregate: Aggregate) -> list[float]:
    """Return the weight of each trained token of each episode, from the episodes' numbers of trained tokens.

    An episode without trained tokens (masked as overlong) is in no denominator.

        token_mean            1 / all tokens
        seq_mean_token_mean   1 / episodes / tokens of the episode
        seq_mean_token_sum    1 / episodes
        constant              1 / episodes / CONSTANT_LENGTH
    """
    episodes, total = sum(count > 0 for count in tokens), sum(tokens)
    if not episodes:
        return [0.0] * len(tokens)
    per_token = {
        "token_mean": [total] * len(tokens),
        "seq_mean_token_mean": [episodes * count for count in tokens],
        "seq_mean_token_sum": [episodes] * len(tokens),
        "constant": [episodes * CONSTANT_LENGTH] * len(tokens),
    }[aggregate]
    return [1.0 / divisor if divisor else 0.0 for divisor in per_token]


def pack(
    step: int, samples: Sequence[Sample], weights: Sequence[float], budget: int, ranks: int
) -> list[Batch]:
    """Build one batch per rank; all have equally many microbatches of at most `budget` tokens.

    Raise ConfigError if a sample is longer than `budget`.
    """
    lengths = [len(sample) for sample in samples]
    costs = list(map(cost, lengths))
    if max(lengths, default=0) > budget:
        raise ConfigError(
            f"a sample of {max(lengths)} tokens is longer than batches.microbatch_tokens = {budget}; raise it"
        )
    each = max(1, -(-sum(lengths) // (budget * ranks)))
    while (bins := _spread(costs, lengths, each * ranks, budget)) is None:
        each += 1
    bins = [sorted(bin) for bin in bins]
    shares = _spread([sum(costs[i] for i in bin) for bin in bins], [1] * len(bins), ranks, each)
    assert shares is not None  # there are `each` bins per rank
    return [
        Batch(step=step, rank=rank, microbatches=[_microbatch(samples, weights, bins[n]) for n in share])
        for rank, share in enumerate(shares)
    ]


def pack_minibatches(
    step: int, weighted: Sequence[Sequence[tuple[Sample, float]]], budget: int, ranks: int, minibatches: int
) -> list[Batch]:
    """Pack the samples of each episode, with their weights, into so many optimizer steps.

    `split` decides which, whatever the budget is. The weights of a step are divided by its share of the
    episodes, so that its loss is an unbiased estimate of the loss of all.
    """
    made: list[list[Batch]] = []
    for part in split(step, len(weighted), minibatches):
        share = len(part) / max(1, len(weighted))
        chosen = [(sample, weight / share) for n in part for sample, weight in weighted[n]]
        made.append(pack(step, [s for s, _ in chosen], [w for _, w in chosen], budget, ranks))
    return [
        Batch(
            step=step,
            rank=rank,
            microbatches=[micro for parts in made for micro in parts[rank].microbatches],
            minibatches=[len(parts[rank].microbatches) for parts in made] if len(made) > 1 else [],
        )
        for rank in range(ranks)
    ]


def split(step: int, episodes: int, minibatches: int) -> list[list[int]]:
    """Divide episodes among the optimizer steps of a batch, at random and as evenly as possible.

    There are fewer steps than `minibatches` when there are fewer episodes. With one step all stay in order.
    """
    order = np.random.default_rng(step).permutation(episodes)
    parts = np.array_split(order, max(1, min(minibatches, episodes)))
    return [sorted(part.tolist()) for part in parts]


def cost(length: int) -> float:
    """Return the work of one sequence in units of one token: linear layers, and attention with its square."""
    return length + length * length / ATTENTION_TOKENS


def _spread(
    costs: Sequence[float], sizes: Sequence[int], count: int, capacity: int
) -> list[list[int]] | None:
    """Put each item, the most expensive first, into the cheapest of `count` bins with room for its size.

    Return the items of each bin in that order, or None when an item finds no room. So `pack` tries with more
    and more microbatches, and succeeds at the latest with one per sample.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    totals, room = [0.0] * count, [capacity] * count
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        fitting = [b for b in range(count) if room[b] >= sizes[item]]
        if not fitting:
            return None
        best = min(fitting, key=lambda b: (totals[b], b))
        bins[best].append(item)
        totals[best] += costs[item]
        room[best] -= sizes[item]
    return bins


def _microbatch(samples: Sequence[Sample], weights: Sequence[float], bin: Sequence[int]) -> MicroBatch:
    if not bin:
        return FILLER
    chosen = [samples[index] for index in bin]
    weighted = [samples[i].mask_array * np.float32(weights[i]) for i in bin]
    return MicroBatch(
        token_ids=b"".join([sample.token_ids for sample in chosen]),
        mask=b"".join([sample.mask for sample in chosen]),
        logprobs=b"".join([sample.logprobs for sample in chosen]),
        advantages=b"".join([sample.advantages for sample in chosen]),
        weights=b"".join([records.floats(array) for array in weighted]),
        sequence_lengths=[len(sample) for sample in chosen],
        routing=_join_routings(chosen),
    )


def _join_routings(samples: Sequence[Sample]) -> bytes:
    """Join the samples' routings; those without one are routed freely, and where none has one it is empty."""
    width = max((len(sample.routing) // len(sample) for sample in samples), default=0)
    return b"".join([sample.routing or bytes([FREE]) * (width * len(sample)) for sample in samples])
