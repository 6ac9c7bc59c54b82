"""Find out where vLLM's own loader copies each checkpoint tensor, and write there directly.

`LoaderCopies.record` runs the loader of a model on tensors without data and notes each copy instead of making
it: which rectangle of which tensor goes where in this worker's memory. This holds for every architecture
whose loader only copies. A delta then changes single values on the device, a full snapshot copies only what
this worker needs, and digests are computed from the device's memory.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_swe.models.deltas.low_rank import Factors
from hpc_swe.models.deltas.tensor_delta import Digests, Rectangle, integers
from hpc_swe.models.engines._vllm.files import BUFFER, Delta, Wanted, own_stream, shards
from hpc_swe.models.engines._vllm.parts import JoinedParts

if TYPE_CHECKING:
    from hpc_swe.models.deltas.placing_kernels import MemoryTables, PlacedDelta

THREADS = 8
SHARE = 4
"""Changed values and their positions may take one part in so many of the memory of the weights."""
VALUE_BYTES = 12
"""Most bytes of one changed value and its position; a GPU holds its code alone."""
T = TypeVar("T")
Work = tuple[Tensor, Tensor]
"""A view of this worker's memory, and what belongs there."""
Gather = Callable[[list[T]], list[list[T]]]
"""Returns what each worker has passed to it."""


@dataclass(frozen=True)
class Copy:
    """Relate a rectangle of a checkpoint tensor to a view of this worker's memory, [rows, columns]."""

    source: Rectangle
    target: Tensor

    def is_same(self, other: "Copy") -> bool:
        """Return whether another copy takes the same part to the same place."""
        mine, its = self.target, other.target
        return (self.source, mine.data_ptr(), mine.stride()) == (other.source, its.data_ptr(), its.stride())


class LoaderCopies:
    """Hold where each checkpoint tensor lies in this worker's memory."""

    def __init__(
        self,
        shapes: Mapping[str, list[int]],
        copies: Mapping[str, Sequence[Copy]],
        has_kernels: bool | None = None,
        widened: Sequence[Work] = (),
    ) -> None:
        """Use Triton's kernels where the memory is a GPU's, or as `has_kernels` says.

        Of `widened` pairs the first, in this worker's memory, has more bits than checkpoints; copies go to
        the second, which is kept equal.

        A tensor without copies, for example an expert, belongs to another worker; `digests` raises ValueError
        for one that no worker holds.
        """
        self._copies, self._widened = {name: copies.get(name, ()) for name in shapes}, widened
        self._wholes = {name: Rectangle.whole(shape) for name, shape in shapes.items()}
        self._listed = [(name, copy) for name, several in copies.items() for copy in several]
        self._device = self._listed[0][1].target.device
        self._digests = Digests(self._device)
        self._joined: JoinedParts | None = None
        self._tables: MemoryTables | None = None
        if self._device.type == "cuda" if has_kernels is None else has_kernels:
            from hpc_swe.models.deltas import placing_kernels  # needs triton, which a CPU may lack

            parts = [(name, integers(copy.target), copy.source) for name, copy in self._listed]
            self._tables = placing_kernels.MemoryTables(parts, self._wholes)

    @classmethod
    def record(
        cls, model: torch.nn.Module, shapes: Mapping[str, list[int]], dtype: torch.dtype
    ) -> "LoaderCopies":
        """Run the model's loader; raise ValueError if it does anything but copy rectangles."""
        sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        recorder = _Recorder(sources)
        with torch.no_grad(), recorder:
            model.load_weights(iter(sources.items()))
        return cls(shapes, recorder.copies, widened=list(recorder.widened.values()))

    def holds(self, name: str) -> bool:
        """Return whether this worker has a part of a tensor."""
        return bool(self._copies[name])

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy what this worker needs of full tensors, which are mapped files."""
        work = [(copy.target, source) for copy, source in self._pairs(tensors)]
        _in_threads(work, _copy_in)
        self.write([])

    def write(self, patches: "Patches") -> None:
        """Write what a version changes."""
        for patch in patches:
            patch.write()
        for wide, narrow in self._widened:
            wide.copy_(narrow)

    def _narrow(self) -> None:
        """Read memory that has more bits than checkpoints; raise ValueError if it has other values."""
        for wide, narrow in self._widened:
            narrow.copy_(wide)
            if not torch.equal(narrow.to(wide.dtype), wide):
                raise ValueError(f"a tensor in {wide.dtype} is not of the {narrow.dtype} of checkpoints")

    @property
    def nbytes(self) -> int:
        """Return the bytes of full tensors that this worker needs."""
        return sum(copy.target.nbytes for copies in self._copies.values() for copy in copies)

    def compare(self, tensors: Mapping[str, Tensor]) -> "list[Patch] | None":
        """Return what differs between this worker's memory and full tensors, which are mapped files.

        Return None if that is too much to hold beside the model.
        """
        self._narrow()
        spare = SpareMemory(self._spare())
        work = [(copy.target, source) for copy, source in self._pairs(tensors)]
        found = _in_threads(work, lambda part: _differences(part, spare))
        return None if spare.is_full else [patch for part in found for patch in part]

    def read(self, folder: Path, wanted: Wanted) -> "Patches | None":
        """Return what the delta in a folder changes; None if that is too much to hold beside the model."""
        spare, is_cpu = self._spare(), self._device.type == "cpu"
        if not is_cpu and sum(file.stat().st_size for file in shards(folder)) >= spare:
            return None
        delta = Delta.read(folder, wanted, self._device)
        if is_cpu and sum(len(each.codes) for each in delta.changes.values()) * VALUE_BYTES >= spare:
            return None
        return self.patches(delta)

    def _spare(self) -> int:
        """Return how many bytes may be used beside the model; the engine needs some of what is free, too."""
        share = self.nbytes // SHARE
        if self._device.type == "cpu":
            return share
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return min(share, free // 2)

    def patches(self, delta: Delta) -> "Patches":
        """Return what a delta changes in this worker's memory, which is not changed here.

        Raise ValueError for changes that do not fit their tensor.
        """
        self._narrow()
        found = [Patch(copy.target, None, source) for copy, source in self._pairs(delta.whole)]
        if self._tables is not None and delta.changes:
            return [*found, self._tables.place(delta.changes)]
        for name, changes in delta.changes.items():
            whole = self._wholes[name]
            where, differences = changes.decode(whole.rows * whole.columns)
            for copy in self._copies[name]:
                positions, mine = _positions(copy, whole, where, differences)
                values = _flat_memory(copy.target)[positions] + mine
                found.append(Patch(copy.target, positions, values))
        return found

    def merge(self, delta: Delta) -> None:
        """Merge adapters into this worker's memory, which holds the initial model."""
        for name, factors in delta.factors.items():
            size = self._wholes[name].rows // len(factors)
            for copy in self._copies[name]:
                at, target = copy.source, copy.target
                row, each = at.row % size, factors[at.row // size]
                if row + at.rows > size:
                    raise ValueError(f"{name}: its loader copies rows of several experts at once")
                a = each.a[:, at.column : at.column + at.columns].to(target.device)
                b = each.b[row : row + at.rows].to(target.device)
                Factors(a, b, each.scale).merge(target, target)

    def _pairs(self, tensors: Mapping[str, Tensor]) -> list[tuple[Copy, Tensor]]:
        return [(copy, _rectangle(tensors[n], copy.source)) for n in tensors for copy in self._copies[n]]

    def digests(self, gather: "Gather[Any]") -> dict[str, int]:
        """Return the digest of each tensor, from what lies in the memory of all workers.

        Raise ValueError unless their parts make up each tensor, and copies of a part are the same.
        """
        if self._joined is None:
            parts = gather([(name, copy.source) for name, copy in self._listed])
            self._joined = JoinedParts(self._wholes, parts)
        return self._joined.add_up(gather(self.shares()))

    def shares(self) -> list[int]:
        """Return the digest of each copy in this worker's memory."""
        self._narrow()
        if self._tables is not None:
            found = self._tables.digests(self._digests)
        else:
            found = torch.stack([self._digests.part(copy.target, copy.source) for _, copy in self._listed])
        shares: list[int] = found.tolist()
        return shares


@dataclass(frozen=True)
class Patch:
    """Hold new values for a part of this worker's memory."""

    target: Tensor
    """View [rows, columns] of this worker's memory."""
    where: Tensor | None
    """Positions in that memory, int64 [k], counted from the view's first element; None is all of it."""
    values: Tensor
    """Integers [k] of the same bits; or a whole tensor [rows, columns]."""

    def write(self) -> None:
        if self.where is None:
            self.target.copy_(self.values)
        else:
            _flat_memory(self.target)[self.where] = self.values


Patches = Sequence["Patch | PlacedDelta"]
"""What one version changes in this worker's memory; a GPU decodes the changes of a delta in the swap."""


class SpareMemory:
    """Count the bytes that threads add, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._left, self._lock = limit, threading.Lock()

    @property
    def is_full(self) -> bool:
        return self._left < 0

    def add(self, size: int) -> None:
        with self._lock:
            self._left -= size


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Note the copies from tensors without data, and carry them out for none."""

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
        self._sources = sources
        self.copies: dict[str, list[Copy]] = {}
        self.widened: dict[int, Work] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default or not args[1].is_meta:
            if func._schema.is_mutable and any(isinstance(arg, Tensor) and arg.is_meta for arg in args):
                raise ValueError(f"its loader calls {func} on a tensor of the checkpoint")
            return func(*args, **(kwargs or {}))
        target, part = args[0], args[1]
        name = self._names.get(part.untyped_storage()._cdata)
        if name is None or target.is_meta or target.shape != part.shape or not _is_exact(target, part):
            raise ValueError(f"its loader does not simply copy {name or 'a tensor that it computed'}")
        if target.dtype != part.dtype:
            pair = target.detach(), torch.empty_like(target, dtype=part.dtype)
            target = self.widened.setdefault(target.data_ptr(), pair)[1]
        at = _locate(self._sources[name], part)
        copy, known = Copy(at, _flat(target.detach(), at)), self.copies.setdefault(name, [])
        if not any(copy.is_same(other) for other in known):  # a difference must be added once
            known.append(copy)
        return args[0]


def _is_exact(target: Tensor, part: Tensor) -> bool:
    """Return whether a copy changes no value."""
    return bool(target.dtype == part.dtype or (target.dtype == torch.float32 and part.dtype.itemsize == 2))


def _locate(whole: Tensor, part: Tensor) -> Rectangle:
    """Return where a view lies in a contiguous tensor; raise ValueError unless it is a rectangle."""
    of = Rectangle.whole(whole.shape)
    columns = part.shape[-1] if part.dim() else 1
    rows = part.numel() // columns if columns else 0
    row, column = divmod(part.storage_offset(), of.columns)
    in_rows = columns <= 1 or (part.stride(-1) == 1 and _is_evenly_spaced(part, of.columns))
    if not in_rows or column + columns > of.columns:
        raise ValueError("its loader takes something else than a rectangle of a tensor")
    return Rectangle(row, column, rows, columns)


def _is_evenly_spaced(part: Tensor, width: int) -> bool:
    step = width
    for size, stride in reversed(list(zip(part.shape[:-1], part.stride()[:-1], strict=True))):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _flat(target: Tensor, at: Rectangle) -> Tensor:
    """Return a target as [rows, columns]; raise ValueError if that needs a copy."""
    try:
        return target.view(at.rows, at.columns)
    except RuntimeError as error:
        raise ValueError(f"its memory is not laid out in rows: {error}") from error


def _rectangle(tensor: Tensor, at: Rectangle) -> Tensor:
    whole = Rectangle.whole(tensor.shape)
    rows = tensor.view(whole.rows, whole.columns)
    return rows[at.row : at.row + at.rows, at.column : at.column + at.columns]


def _flat_memory(target: Tensor) -> Tensor:
    """Return the memory from a view's first element to its last as a vector of integers."""
    bits = integers(target)
    span = sum((size - 1) * stride for size, stride in zip(bits.shape, bits.stride(), strict=True)) + 1
    return bits.as_strided((span,), (1,))


def _positions(copy: Copy, whole: Rectangle, where: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of the flat positions `where` of a whole tensor a copy holds, and where in its memory."""
    at, stride = copy.source, copy.target.stride(0)
    if at == whole and (stride == whole.columns or whole.rows == 1):
        return where, values
    rows, columns = where // whole.columns - at.row, where % whole.columns - at.column
    inside = (rows >= 0) & (rows < at.rows) & (columns >= 0) & (columns < at.columns)
    return (rows * stride + columns * copy.target.stride(1))[inside], values[inside]


def _in_threads(work: Sequence[Work], act: Callable[[Sequence[Work]], T]) -> list[T]:
    parts: list[list[Work]] = [[] for _ in range(THREADS)]
    sizes = [0] * THREADS
    for each in sorted(work, key=lambda pair: -pair[1].nbytes):
        shortest = sizes.index(min(sizes))
        parts[shortest].append(each)
        sizes[shortest] += each[1].nbytes
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(act, [part for part in parts if part]))


def _pieces(work: Sequence[Work]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of targets, and the same pieces of sources on the targets' device.

    They come through one pinned buffer where that is a GPU, on a stream of the caller's thread.
    """
    device = work[0][0].device
    if device.type == "cpu":
        yield from work
        return
    buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True)
    for target, source in work:
        step = max(1, BUFFER // max(1, source[0].nbytes))
        for piece, place in zip(source.split(step), target.split(step), strict=True):
            part = buffer[: piece.numel() * piece.element_size()].view(piece.dtype).view(piece.shape)
            part.copy_(piece)
            yield place, part
            torch.cuda.current_stream(device).synchronize()


def _copy_in(work: Sequence[Work]) -> None:
    with own_stream(work[0][0].device):
        for place, piece in _pieces(work):
            place.copy_(piece, non_blocking=True)


def _differences(work: Sequence[Work], spare: SpareMemory) -> list[Patch]:
    found = []
    with own_stream(work[0][0].device):
        for place, piece in _pieces(work):
            new = integers(piece.to(place.device, non_blocking=True))
            rows, columns = (integers(place) != new).nonzero(as_tuple=True)
            where = rows * place.stride(0) + columns * place.stride(1)
            found.append(Patch(place, where, new[rows, columns]))
            spare.add(where.nbytes + found[-1].values.nbytes)
            if spare.is_full:
                return []
    return found
