"""Encode what changed between two versions of a tensor, and compute digests that add up over its parts.

An optimizer step at a small learning rate changes few bf16 values, and most of those by one unit in the last
place. `encode` therefore writes one byte for each such change: the distance to the change before it, and the
sign. Nothing is rounded: integers stand for bit patterns, so `Changes.apply` restores every bit.

The digest of a tensor is the sum over its elements of (bits) x (weight of the position) modulo 2^64, where
the weight is a pseudo-random odd number of the row times one of the column. A part that is a rectangle adds
its share, whichever process holds it, and changes add their differences. One wrong element always changes the
sum; several at random leave it unchanged with a probability below 2^-32. It finds corruption and mistakes. It
does not stop somebody who wants a collision; for that each file has its sha256.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

REACH = 85
"""Largest distance that one byte can state; 3 kinds x 85 distances leave 255 for SKIP."""
SKIP = 255
"""This byte goes on by REACH elements without a change."""
PIECE = 1 << 25
"""Elements of which a digest is computed at one time; each needs 16 bytes meanwhile."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Changes:
    """Hold the changed elements of one tensor, in the order of its flat positions."""

    codes: Tensor
    """uint8: SKIP, or 85 x kind + distance - 1; kinds are +1, -1 and another difference."""
    others: Tensor
    """The differences of the third kind, in order, as integers of the tensor's width."""

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.others.nbytes)

    def to(self, device: torch.device) -> "Changes":
        return Changes(self.codes.to(device), self.others.to(device))

    def decode(self, count: int) -> tuple[Tensor, Tensor]:
        """Return flat positions, int64 [k], and differences of the bits, integers [k], for `count` elements.

        Raise ValueError if the changes do not fit a tensor of so many elements.
        """
        is_change = self.codes != SKIP
        steps = torch.where(is_change, self.codes % REACH + 1, REACH)
        ends = steps.cumsum(0, dtype=torch.int64)
        where = (ends - 1)[is_change]
        kinds = self.codes[is_change] // REACH
        differences = (1 - 2 * kinds.to(self.others.dtype)) * (kinds < 2)
        is_other = kinds == 2
        if int(is_other.sum()) != len(self.others) or (len(ends) and int(ends[-1]) > count):
            raise ValueError(f"changes that do not fit {count} elements")
        differences[is_other] = self.others
        return where, differences

    def apply(self, tensor: Tensor) -> None:
        """Change a contiguous tensor in place from the old version to the new one."""
        flat = integers(tensor).view(-1)
        where, differences = self.decode(len(flat))
        flat[where] += differences


def integers(tensor: Tensor) -> Tensor:
    """Return a view of the bits of a tensor as integers of the same width."""
    return tensor.view(INTEGERS[tensor.element_size()])


def changed(old: Tensor, new: Tensor) -> Tensor:
    """Return the flat positions, int64 [k], at which the bits of two contiguous tensors differ."""
    return (integers(old).view(-1) != integers(new).view(-1)).nonzero().view(-1)


def encode(old: Tensor, new: Tensor, where: Tensor | None = None) -> Changes | None:
    """Return what changed between two contiguous tensors; None if the whole new one takes less room.

    A caller that knows `changed(old, new)` passes it as `where`.
    """
    before, after = integers(old).view(-1), integers(new).view(-1)
    where = changed(old, new) if where is None else where
    differences = after[where] - before[where]
    kinds = torch.full_like(where, 2, dtype=torch.uint8)
    kinds[differences == 1], kinds[differences == -1] = 0, 1
    distances = torch.diff(where, prepend=where.new_full((1,), -1)) - 1
    ends = torch.cumsum(distances // REACH + 1, 0) - 1
    codes = torch.full((int(ends[-1]) + 1 if len(ends) else 0,), SKIP, dtype=torch.uint8, device=new.device)
    codes[ends] = kinds * REACH + (distances % REACH).to(torch.uint8)
    changes = Changes(codes, differences[kinds == 2])
    return changes if changes.nbytes < new.nbytes else None


@dataclass(frozen=True)
class Rectangle:
    """Name a part of a tensor whose leading dimensions are flattened into rows."""

    row: int
    column: int
    rows: int
    columns: int

    @classmethod
    def whole(cls, shape: "torch.Size | list[int]") -> "Rectangle":
        """Return the rectangle of a whole tensor; one of a single dimension is one row."""
        columns = shape[-1] if shape else 1
        count = 1
        for size in shape:
            count *= size
        return cls(0, 0, count // columns if columns else 0, columns)


class Digests:
    """Compute digests on one device; the weights of positions are computed once."""

    def __init__(self, device: torch.device) -> None:
        self._rows = _Weights(1, device)
        self._columns = _Weights(2, device)

    def part(self, part: Tensor, at: Rectangle) -> Tensor:
        """Return the share of a part [rows, columns], an int64 scalar on the device."""
        rows = self._rows.get(at.row, at.rows)
        columns = self._columns.get(at.column, at.columns)
        if part.is_cuda and part.stride(-1) == 1:
            from hpc_swe.models.deltas.digest_kernels import (
                weighted_sums,  # needs triton, which a CPU may lack
            )

            return weighted_sums(integers(part), rows, columns).sum()
        bits, mask = integers(part), (1 << (8 * part.element_size())) - 1
        total = rows.new_zeros(())
        step = max(1, PIECE // max(1, at.columns))
        for first in range(0, at.rows, step):
            piece = (bits[first : first + step].to(torch.int64) & mask) * columns
            total += (piece.sum(1) * rows[first : first + step]).sum()
        return total

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return the digest of a whole tensor."""
        at = Rectangle.whole(tensor.shape)
        return self.part(tensor.reshape(at.rows, at.columns), at)

    def weights(self, wholes: Collection[Rectangle]) -> tuple[Tensor, Tensor]:
        """Return the weights of as many rows, and of as many columns, as any of some whole tensors has."""
        rows, columns = max(at.rows for at in wholes), max(at.columns for at in wholes)
        return self._rows.get(0, rows), self._columns.get(0, columns)

    def change(self, old: Tensor, new: Tensor, where: Tensor | None = None) -> Tensor:
        """Return how much the digest of a contiguous tensor grows when it changes from old to new.

        A caller that knows `changed(old, new)` passes it as `where`.
        """
        before, after = integers(old).view(-1), integers(new).view(-1)
        where = changed(old, new) if where is None else where
        mask = (1 << (8 * new.element_size())) - 1
        grown = (after[where].to(torch.int64) & mask) - (before[where].to(torch.int64) & mask)
        at = Rectangle.whole(new.shape)
        rows, columns = self.weights([at])
        return (grown * rows[where // at.columns] * columns[where % at.columns]).sum()


def encode_all(
    pairs: Sequence[tuple[Tensor, Tensor]], digests: Digests
) -> tuple[list[Changes | None], Tensor]:
    """Return what `encode` finds in each pair of old and new, and the growths of digests, int64 [pairs].

    All must be contiguous and on one device; for a GPU the host waits once.
    """
    if not pairs or not pairs[0][1].is_cuda:
        found = [(old, new, changed(old, new)) for old, new in pairs]
        growths = [int(digests.change(*each)) for each in found]
        return [encode(*each) for each in found], torch.tensor(growths, dtype=torch.int64)
    from hpc_swe.models.deltas import delta_kernels  # needs triton, which a CPU may lack

    wholes = {shape: Rectangle.whole(shape) for shape in {new.shape for _, new in pairs}}
    columns = [wholes[new.shape].columns for _, new in pairs]
    coded, growths = delta_kernels.encode_all(pairs, columns, digests.weights(wholes.values()))
    return [each and Changes(*each) for each in coded], growths


def text(digest: int) -> str:
    """Write a digest as a manifest holds it: 16 hex digits."""
    return f"{digest % (1 << 64):016x}"


class _Weights:
    """Hold pseudo-random odd numbers by index, int64; splitmix64 mixes them from the index and a seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._known = seed, torch.empty(0, dtype=torch.int64, device=device)

    def get(self, first: int, count: int) -> Tensor:
        if len(self._known) < first + count:
            index = torch.arange(first + count, dtype=torch.int64, device=self._known.device)
            self._known = _mix(index + (self._seed << 40)) | 1
        return self._known[first : first + count]


def _mix(values: Tensor) -> Tensor:
    values = values * -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        values = (values ^ _shifted(values, shift)) * factor
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, count: int) -> Tensor:
    return (values >> count) & ((1 << (64 - count)) - 1)
