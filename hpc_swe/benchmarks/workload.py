"""Make the batches that a benchmark trains: packs of sequences with random tokens, a mask and advantages."""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpc_swe.errors import ConfigError
from hpc_swe.records import Batch, MicroBatch, Record, floats, ids

TURN = 256
"""Number of tokens after which the mask repeats: an observation that is not trained, then a completion. A
shorter sequence has one of each."""


class Workload(Record, frozen=True, kw_only=True):
    """A workload says what one step trains; all columns of a table train the same."""

    lengths: list[int]
    """Length of each sequence of a pack."""
    mask_share: float
    """Share of the tokens that are trained."""
    packs: int
    """Packs of a step, over all data-parallel ranks."""
    vocab: int

    @property
    def trained(self) -> int:
        """Return how many tokens of a pack are trained."""
        return int(self.mask().sum())

    def mask(self) -> NDArray[np.uint8]:
        """Return the mask of a pack, uint8 [tokens]; the first token of a sequence is never trained."""
        return np.concatenate([self._mask(length) for length in self.lengths]).astype(np.uint8)

    def _mask(self, length: int) -> NDArray[np.bool_]:
        turn = min(TURN, length)
        mask: NDArray[np.bool_] = np.arange(length) % turn >= round(turn * (1 - self.mask_share))
        mask[0] = False
        return mask

    def batch(self, step: int, rank: int, ranks: int) -> Batch:
        """Return the share of one data-parallel rank: every `ranks`-th pack, as a microbatch each.

        Raise ConfigError if the ranks cannot share the packs evenly.
        """
        if self.packs % ranks:
            raise ConfigError(f"--packs {self.packs} is no multiple of the {ranks} data-parallel ranks")
        return Batch(
            step=step,
            rank=rank,
            microbatches=[self._pack(step, number) for number in range(rank, self.packs, ranks)],
        )

    def _pack(self, step: int, number: int) -> MicroBatch:
        mask, rng = self.mask(), np.random.default_rng((step, number))
        advantages = np.repeat(rng.choice([-1.0, 1.0], len(self.lengths)), self.lengths)
        sampler = rng.normal(-np.log(self.vocab), 0.1, len(mask))
        weight = 1 / max(1, self.packs * self.trained)
        return MicroBatch(
            token_ids=ids(rng.integers(0, self.vocab, len(mask)).astype("<i4")),
            mask=mask.tobytes(),
            logprobs=floats((sampler * mask).astype("<f4")),
            advantages=floats((advantages * mask).astype("<f4")),
            weights=floats((weight * mask).astype("<f4")),
            sequence_lengths=list(self.lengths),
        )


def parse_lengths(text: str) -> list[int]:
    """Return the lengths that a text such as "8192x2,1024x8" lists; raise ConfigError for another text.

    Example:
        >>> parse_lengths("64x2,32")
        [64, 64, 32]
    """
    found: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:x(\d+))?\s*", word)
        length, count = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if length < 2 or count < 1:
            raise ConfigError(
                f"--lengths {text!r}: {word!r} is no length of at least 2; write lengths with commas between "
                "them, and LENGTHxCOUNT for several of one length, as in 8192x2,1024x8"
            )
        found += [length] * count
    return found


def spell_lengths(lengths: Sequence[int]) -> str:
    """Return the text that `parse_lengths` reads.

    Example:
        >>> spell_lengths([64, 64, 32])
        '64x2,32'
    """
    runs: list[tuple[int, int]] = []
    for length in lengths:
        same = bool(runs) and runs[-1][0] == length
        runs = [*runs[:-1], (length, runs[-1][1] + 1)] if same else [*runs, (length, 1)]
    return ",".join(f"{length}x{count}" if count > 1 else f"{length}" for length, count in runs)
