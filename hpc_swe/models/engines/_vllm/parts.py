"""Add up the digests of parts of tensors that several workers hold.

Parts stay the same from one version to the next. What is known about them is therefore found once, and a
pause has to exchange and to add up numbers alone.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from hpc_swe.models.deltas.tensor_delta import Rectangle

HeldPart = tuple[str, Rectangle]
"""A tensor, and a part of it that a worker holds."""


class JoinedParts:
    """Know which parts of which tensors all workers hold.

    They hold the same part twice where heads or norms are replicated; each copy must have the same digest.
    """

    def __init__(self, wholes: Mapping[str, Rectangle], parts: Sequence[Sequence[HeldPart]]) -> None:
        """Take the parts of each worker; raise ValueError unless they make up each tensor."""
        self._names = list(wholes)
        firsts: dict[HeldPart, int] = {}
        first = [firsts.setdefault(each, i) for i, each in enumerate(part for own in parts for part in own)]
        self._first = np.array(first)
        """The first copy of each part, int64 [copies]."""
        self._distinct = np.array(list(firsts.values()))
        index, sizes = {name: i for i, name in enumerate(wholes)}, dict.fromkeys(wholes, 0)
        self._tensors = np.array([index[name] for name, _ in firsts])
        """The tensor of each distinct part, int64 [parts]."""
        for name, at in firsts:
            sizes[name] += at.rows * at.columns
        for name, whole in wholes.items():
            if sizes[name] != whole.rows * whole.columns:
                raise ValueError(f"{name}: workers do not hold each of its values exactly once")

    def add_up(self, digests: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return the digest of each tensor from those of each worker's parts, signed numbers of 64 bits.

        Raise ValueError if copies of a part differ.
        """
        found = np.array([digest for own in digests for digest in own], dtype=np.int64)
        for i in np.flatnonzero(found != found[self._first]):
            part = np.flatnonzero(self._distinct == self._first[i])[0]
            raise ValueError(f"{self._names[self._tensors[part]]}: two copies of the same part differ")
        sums = np.zeros(len(self._names), dtype=np.int64)
        np.add.at(sums, self._tensors, found[self._distinct])
        return dict(zip(self._names, sums.tolist(), strict=True))
