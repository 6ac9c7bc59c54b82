"""Pack samples into microbatches: every token once, with its weight, the work balanced over ranks.

The learner adds up weight times term and divides by nothing. Each weight contains the denominator of the
whole step, so the way in which samples are packed cannot change the gradient. Packing is deterministic.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hpc_swe import records
from hpc_swe.errors import ConfigError
from hpc_swe.records import Batch, MicroBatch, Sample

Aggregate = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
# Number of tokens at which attention costs as much as the rest of a layer, for a hidden size of 2048. It only
# affects the balance, so it need not match the model.
ATTENTION_TOKENS = 24_576
FILLER = MicroBatch(
    token_ids=records.ids([0, 0]),
    mask=b"\0\0",
    logprobs=records.floats([0, 0]),
    advantages=records.floats([0, 0]),
    weights=records.floats([0, 0]),
    sequence_lengths=[2],
)
"""A rank without samples runs this, because all ranks must run the same collectives."""


def token_weights(tokens: Sequence[int], aggregate: Aggregate, constant_length: int) -> list[float]:
    """Return the weight of each trained token of each episode, from the episodes' numbers of trained tokens.

    An episode without trained tokens (masked as overlong, or stale as a whole) is in no denominator.

        token_mean            1 / all tokens
        seq_mean_token_mean   1 / episodes / tokens of the episode
        seq_mean_token_sum    1 / episodes
        constant              1 / episodes / constant_length
    """
    episodes, total = sum(count > 0 for count in tokens), sum(tokens)
    if not episodes:
        return [0.0] * len(tokens)
    per_token = {
        "token_mean": [total] * len(tokens),
        "seq_mean_token_mean": [episodes * count for count in tokens],
        "seq_mean_token_sum": [episodes] * len(tokens),
        "constant": [episodes * constant_length] * len(tokens),
    }[aggregate]
    return [1.0 / divisor if divisor else 0.0 for divisor in per_token]


def pack(
    step: int, samples: Sequence[Sample], weights: Sequence[float], budget: int, ranks: int
) -> list[Batch]:
    """Build one batch per rank; all have equally many microbatches of at most `budget` tokens.

    Raises:
        ConfigError: A sample is longer than `budget`.
    """
    lengths = [len(sample) for sample in samples]
    if max(lengths, default=0) > budget:
        raise ConfigError(
            f"a sample of {max(lengths)} tokens is longer than batches.microbatch_tokens = {budget}; raise it"
        )
    each = max(1, -(-sum(lengths) // (budget * ranks)))
    while (bins := _fill(lengths, each * ranks, budget)) is None:
        each += 1
    return [
        Batch(step=step, rank=rank, microbatches=[_microbatch(samples, weights, bin) for bin in share])
        for rank, share in enumerate(_assign(bins, lengths, ranks))
    ]


def cost(length: int) -> float:
    """Return the work of one sequence in units of one token: linear layers, and attention with its square."""
    return length + length * length / ATTENTION_TOKENS


def _fill(lengths: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """Put each sample, the longest first, into the cheapest bin with room; return None when one has no room.

    `pack` tries with more and more bins, and succeeds at the latest with one bin per sample.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    costs, room = [0.0] * count, [budget] * count
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        open_bins = [b for b in range(count) if room[b] >= lengths[index]]
        if not open_bins:
            return None
        best = min(open_bins, key=lambda b: (costs[b], b))
        bins[best].append(index)
        costs[best] += cost(lengths[index])
        room[best] -= lengths[index]
    return [sorted(bin) for bin in bins]


def _assign(bins: list[list[int]], lengths: Sequence[int], ranks: int) -> list[list[list[int]]]:
    """Give each bin, the most expensive first, to the rank with the least work that may still get one."""
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    costs, each = [0.0] * ranks, len(bins) // ranks
    price = [sum(cost(lengths[index]) for index in bin) for bin in bins]
    for number in sorted(range(len(bins)), key=lambda b: (-price[b], b)):
        rank = min((r for r in range(ranks) if len(shares[r]) < each), key=lambda r: (costs[r], r))
        shares[rank].append(bins[number])
        costs[rank] += price[number]
    return shares


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
    )
