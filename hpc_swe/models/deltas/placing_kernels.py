"""Apply what changed in tensors to parts of them on CUDA; tensor_delta.py says how changes are stored.

An engine does this in two steps. `place_all` and `PlacedChanges.into` find where the codes of all tensors
belong while the engine still serves, and wait for the GPU once. `PlacedDelta.write` then changes the memory;
what it asks of the GPU does not depend on how many tensors there are. Tables on the device say where codes
and memory lie. The records that hold a table hold the tensors to which it points, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hpc_swe.models.deltas import delta_kernels
from hpc_swe.models.deltas.delta_kernels import REACH, SKIP, WARPS, Blocks
from hpc_swe.models.deltas.digest_kernels import TYPES, RectangleSums
from hpc_swe.models.deltas.tensor_delta import INTEGERS, Changes, Digests, Rectangle

TYPED = set(INTEGERS.values())
MemoryPart = tuple[str, Tensor, Rectangle]
"""A tensor, a view [rows, columns] of memory, integers, and the rectangle of the tensor that lies there."""


class MemoryTables:
    """Hold where parts of tensors lie in the device's memory, where they stay, to treat all at once."""

    def __init__(self, parts: Sequence[MemoryPart], wholes: Mapping[str, Rectangle]) -> None:
        """Take parts of 1, 2 or 4 bytes a value, all on one device, and the rectangles of whole tensors."""
        self._parts, self._wholes = parts, wholes
        self._sums = RectangleSums([(view, (at.row, at.column)) for _, view, at in parts])
        self._indices: dict[str, list[int]] = {}
        for i, (name, _, _) in enumerate(parts):
            self._indices.setdefault(name, []).append(i)
        self.device = parts[0][1].device
        self.sizes = np.array([view.element_size() for _, view, _ in parts])
        """Bytes of a value of each part, int64 [parts]."""
        rows = [
            [view.data_ptr(), wholes[name].columns, at.row, at.column, *view.shape, *view.stride()]
            for name, view, at in parts
        ]
        self.table = torch.from_numpy(np.array(rows, dtype=np.int64)).t().contiguous().to(self.device)
        """int64 [8, parts]: pointer, columns of the tensor, first row and column, rows, columns, strides."""
        self.width = max(whole.columns for whole in wholes.values())

    def digests(self, computer: Digests) -> Tensor:
        """Return the digest of each part, int64 [parts]."""
        rows, columns = computer.weights([Rectangle(0, 0, *self._sums.shape)])
        found = self._sums.add_up(rows, columns)
        for i in self._sums.left_out:
            _, view, at = self._parts[i]
            found[i] = computer.part(view, at)
        return found

    def place(self, changes: Mapping[str, Changes]) -> "PlacedDelta":
        """Find where changes belong, at least those of one tensor.

        Raise ValueError for changes that do not fit their tensor.
        """
        counts = [self._wholes[name].rows * self._wholes[name].columns for name in changes]
        pairs = [(i, part) for i, name in enumerate(changes) for part in self._indices.get(name, ())]
        stored = list(changes.values())
        if any(each.codes.device != self.device or each.others.device != self.device for each in stored):
            halves = [each.codes for each in stored], [each.others for each in stored]
            stored = list(map(Changes, *(moved(half, self.device) for half in halves)))
        return place_all(list(changes), stored, counts).into(self, pairs)


@dataclass(frozen=True)
class PlacedChanges:
    """Hold the changes of tensors on the device, and where those of each block of codes belong."""

    names: Sequence[str]
    """Of the tensors."""
    changes: Sequence[Changes]
    table: Tensor
    """int64 [4, tensors]: pointers to codes and others, how many codes, and the first block of codes."""
    places: Tensor
    """int64 [2, blocks]: how many positions and others of its tensor come before a block of codes."""
    blocks: np.ndarray
    """How many blocks of codes each tensor has, int64 [tensors]."""
    sizes: np.ndarray
    """Bytes of a difference of each tensor, int64 [tensors]."""

    def into(self, tables: MemoryTables, pairs: Sequence[tuple[int, int]]) -> "PlacedDelta":
        """Prepare to change some parts; a pair names a tensor and one of its parts by their indices.

        Raise ValueError if values have another size than their changes.
        """
        which = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        stored, sizes = self.sizes[which[:, 0]], tables.sizes[which[:, 1]]
        for i in np.flatnonzero(stored != sizes):
            name = self.names[which[i, 0]]
            raise ValueError(f"{name}: changes of values of {stored[i]} bytes, where values have {sizes[i]}")
        launches = [
            self._launch(tables, which[sizes == size], TYPES[size]) for size in np.unique(sizes).tolist()
        ]
        for launch in launches:
            launch.compile(self.places)
        return PlacedDelta(self, tables, launches)

    def _launch(self, tables: MemoryTables, pairs: np.ndarray, dtype: tl.dtype) -> "_Launch":
        counts = self.blocks[pairs[:, 0]]
        tensors, parts, repeats = delta_kernels.on_device(np.stack([*pairs.T, counts]), self.places.device)
        starts = repeats.cumsum(0) - repeats
        table = torch.cat([self.table[:, tensors], starts[None], tables.table[:, parts]])
        own = _numbered(repeats, int(counts.sum()))
        is_narrow = tables.width + delta_kernels.BLOCK * REACH.value < 1 << 31
        return _Launch(table, own, dtype, is_narrow)


@dataclass(frozen=True)
class PlacedDelta:
    """Hold all that is needed to change memory at once."""

    changes: PlacedChanges
    tables: MemoryTables
    launches: "Sequence[_Launch]"
    """One for each size of values."""

    def write(self) -> None:
        """Add the differences."""
        for launch in self.launches:
            launch.run(self.changes.places)


@dataclass(frozen=True)
class _Launch:
    """Hold one call of the kernel."""

    table: Tensor
    """int64 [13, parts]: those of `PlacedChanges`, the first program of a part, those of `MemoryTables`."""
    own: Tensor
    """The part that a program changes, int32 [programs]."""
    dtype: tl.dtype
    is_narrow: bool
    """Whether a column, and the positions of a block after it, fit 31 bits."""

    def run(self, places: Tensor) -> None:
        inputs = self.table, self.table.shape[1], self.own, places, places.shape[1]
        _apply[(len(self.own),)](*inputs, self.dtype, self.is_narrow, delta_kernels.BLOCK, num_warps=WARPS)

    def compile(self, places: Tensor) -> None:
        """Run the kernel on no codes: its first call takes long, for it compiles."""
        empty = self.table.new_ones(len(self.table), 1)
        empty[2:5] = 0
        _Launch(empty, self.own.new_zeros(1), self.dtype, self.is_narrow).run(places)


def place_all(names: Sequence[str], changes: Sequence[Changes], counts: Sequence[int]) -> PlacedChanges:
    """Find where the changes of tensors of `counts` elements belong; all are contiguous, on one device.

    Raise ValueError, with the tensor's name, if they do not fit.
    """
    for name, each in zip(names, changes, strict=True):
        if each.codes.dtype != torch.uint8 or each.others.dtype not in TYPED:
            raise ValueError(f"{name}: codes and others are of {each.codes.dtype} and {each.others.dtype}")
        if each.codes.dim() != 1 or each.others.dim() != 1:
            raise ValueError(f"{name}: codes and others are no vectors")
    device, sizes = changes[0].codes.device, [each.codes.numel() for each in changes]
    blocks = Blocks.of(sizes, device)
    codes, others = [each.codes.data_ptr() for each in changes], [each.others.data_ptr() for each in changes]
    listed = np.array([codes, others, sizes, blocks.starts, blocks.counts], dtype=np.int64)
    table = delta_kernels.on_device(listed, device)
    own = _numbered(table[4], blocks.size)
    sums = torch.empty(2, blocks.size, dtype=torch.int64, device=device)
    inputs = table, len(changes), own, sums, blocks.size
    _measure[(blocks.size,)](*inputs, delta_kernels.BLOCK, num_warps=WARPS)
    before, found = zip(*map(blocks.before, sums), strict=True)
    reached, coded = torch.stack(found).cpu().numpy()  # the one wait
    stored = np.array([each.others.numel() for each in changes])
    for i in np.flatnonzero((reached > np.array(counts)) | (coded != stored)):
        raise ValueError(f"{names[i]}: changes that do not fit {counts[i]} elements")
    widths = np.array([each.others.element_size() for each in changes])
    return PlacedChanges(names, changes, table[:4], torch.stack(before), listed[4], widths)


def moved(vectors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return vectors on a device, where all of one type come as one piece."""
    found = list(vectors)
    for dtype in {each.dtype for each in vectors}:
        which = [i for i, each in enumerate(vectors) if each.dtype == dtype]
        piece = torch.cat([vectors[i] for i in which]).to(device)
        for i, part in zip(which, piece.split([len(vectors[i]) for i in which]), strict=True):
            found[i] = part
    return found


def _numbered(repeats: Tensor, count: int) -> Tensor:
    """Return each index as often as `repeats` says, int32 [count]."""
    index = torch.arange(len(repeats), dtype=torch.int32, device=repeats.device)
    return index.repeat_interleave(repeats, output_size=count)


@triton.jit(do_not_specialize=["table", "tensors", "own", "sums", "blocks"])
def _measure(table, tensors, own, sums, blocks, block: tl.constexpr):
    """Note how many positions a block of codes goes on by, and how many others it has."""
    index = tl.program_id(0)
    wide = tl.cast(tensors, tl.int64)
    at = table + tl.load(own + index)
    codes = tl.load(at).to(tl.pointer_type(tl.uint8))
    place = (index - tl.load(at + 3 * wide)) * block + tl.arange(0, block)
    there = place < tl.load(at + 2 * wide)
    code = tl.load(codes + place, mask=there, other=0).to(tl.int32)
    length = tl.where(code == SKIP, REACH, code % REACH + 1)
    tl.store(sums + index, tl.sum(tl.where(there, length, 0), 0).to(tl.int64))
    others = tl.sum((there & (code // REACH == 2)).to(tl.int32), 0)
    tl.store(sums + index + tl.cast(blocks, tl.int64), others.to(tl.int64))


@triton.jit(do_not_specialize=["table", "parts", "own", "places", "blocks"])
def _apply(
    table, parts, own, places, blocks, dtype: tl.constexpr, is_narrow: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0)
    wide = tl.cast(parts, tl.int64)
    at = table + tl.load(own + index)
    codes = tl.load(at).to(tl.pointer_type(tl.uint8))
    others = tl.load(at + wide).to(tl.pointer_type(dtype))
    index -= tl.load(at + 4 * wide)
    places += tl.load(at + 3 * wide) + index
    target = tl.load(at + 5 * wide).to(tl.pointer_type(dtype))
    width = tl.load(at + 6 * wide)
    place = index * block + tl.arange(0, block)
    there = place < tl.load(at + 2 * wide)
    code = tl.load(codes + place, mask=there, other=255).to(tl.int32)
    length = tl.where(code == SKIP, REACH, code % REACH + 1)
    kind = code // REACH
    is_other = kind == 2
    begin = tl.load(places)
    row = begin // width
    column = begin - row * width
    if is_narrow:  # a division of 64 bits takes several times as long
        column = column.to(tl.int32)
        width = width.to(tl.int32)
    column += tl.cumsum(length, 0) - 1
    row += column // width - tl.load(at + 7 * wide)
    column = column % width - tl.load(at + 8 * wide)
    inside = there & (kind < 3) & (row >= 0) & (row < tl.load(at + 9 * wide))
    inside = inside & (column >= 0) & (column < tl.load(at + 10 * wide))
    which = tl.load(places + blocks) + tl.cumsum(is_other.to(tl.int32), 0) - 1
    other = tl.load(others + which, mask=is_other & inside, other=0)
    step = tl.where(is_other, other, tl.where(kind == 0, 1, -1).to(dtype))
    memory = target + row * tl.load(at + 11 * wide) + column * tl.load(at + 12 * wide)
    tl.store(memory, tl.load(memory, mask=inside, other=0) + step, mask=inside)
