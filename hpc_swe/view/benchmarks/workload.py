"""Make the batches that a benchmark trains: packs of sequences with random tokens, a mask and advantages."""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Batch, MicroBatch, Record, floats, ids

TURN = 256
"""Number of tokens after which the mask repeats: an observation that is not trained, then a completion. A
shorter sequence has one of each."""
LONGEST = 10**7


class Workload(Record, frozen=True, kw_only=True):
    """A workload says what one step trains; all columns of a table train the same."""

    lengths: list[int]
    """Length of each sequence of a pack."""
    vary: bool = False
    """Whether each pack draws its lengths anew, around these and with the same sum, as in training."""
    mask_share: float
    """Share of the tokens that are trained."""
    packs: int
    """Packs of a step, over all data-parallel ranks."""
    vocab: int

    def lengths_of(self, step: int, number: int) -> list[int]:
        """Return the lengths of one pack of a step."""
        if not self.vary:
            return self.lengths
        shares = np.random.default_rng((number, step)).uniform(0.5, 1.5, len(self.lengths)) * self.lengths
        ends = np.rint(sum(self.lengths) * shares.cumsum() / shares.sum())
        return [int(length) for length in np.diff(ends, prepend=0)]

    def mask(self, lengths: Sequence[int]) -> NDArray[np.uint8]:
        """Return the mask of a pack, uint8 [tokens]; the first token of a sequence is never trained."""
        return np.concatenate([self._mask(length) for length in lengths]).astype(np.uint8)

    def packs_of(self, step: int) -> list[tuple[list[int], int]]:
        """Return the lengths of each pack of a step, and how many of its tokens are trained."""
        lengths = [self.lengths_of(step, number) for number in range(self.packs)]
        return [(each, int(self.mask(each).sum())) for each in lengths]

    def batch(self, step: int, rank: int, ranks: int) -> Batch:
        """Return the share of one data-parallel rank: every `ranks`-th pack, as a microbatch each.

        Raise ConfigError if the ranks cannot share the packs evenly.
        """
        if self.packs % ranks:
            raise ConfigError(f"--packs {self.packs} is no multiple of the {ranks} data-parallel ranks")
        weight = 1 / max(1, sum(trained for _, trained in self.packs_of(step)))
        return Batch(
            step=step,
            rank=rank,
            microbatches=[self._pack(step, number, weight) for number in range(rank, self.packs, ranks)],
        )

    def _mask(self, length: int) -> NDArray[np.bool_]:
        turn = min(TURN, length)
        mask: NDArray[np.bool_] = np.arange(length) % turn >= round(turn * (1 - self.mask_share))
        mask[0] = False
        return mask

    def _pack(self, step: int, number: int, weight: float) -> MicroBatch:
        lengths, rng = self.lengths_of(step, number), np.random.default_rng((step, number))
        mask = self.mask(lengths)
        advantages = np.repeat(rng.choice([-1.0, 1.0], len(lengths)), lengths)
        sampler = rng.normal(-np.log(self.vocab), 0.1, len(mask))
        return MicroBatch(
            token_ids=ids(rng.integers(0, self.vocab, len(mask)).astype("<i4")),
            mask=mask.tobytes(),
            logprobs=floats((sampler * mask).astype("<f4")),
            advantages=floats((advantages * mask).astype("<f4")),
            weights=floats((weight * mask).astype("<f4")),
            sequence_lengths=lengths,
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
        if not 2 <= length <= LONGEST or not 1 <= count <= LONGEST:
            raise ConfigError(
                f"--lengths {text!r}: {word!r} is no length of 2 to {LONGEST:,}; write lengths with commas "
                "between them, and LENGTHxCOUNT for several of one length, as in 8192x2,1024x8"
            )
        found += [length] * count
    return found
