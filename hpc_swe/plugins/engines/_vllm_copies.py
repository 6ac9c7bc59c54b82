"""Find out where vLLM's own loader copies each checkpoint tensor, and write there directly.

`LoaderCopies.record` runs the loader of a model on tensors without data and notes each copy instead of making
it: which rectangle of which tensor goes where in this worker's memory. This holds for every architecture
whose loader only copies. A delta then changes single values on the device, a full snapshot copies only what
this worker needs, and digests are computed from the device's memory.

A model is left to vLLM's reload when anything else is derived from its weights: the list of layers below is
short on purpose, because a stale derived tensor would go unnoticed.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_swe.plugins.engines._vllm_files import Delta
from hpc_swe.plugins.tensor_delta import Changes, Digests, Rectangle, integers

PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""Quantization methods that leave weights on a GPU as they were loaded."""
PLAIN_LAYERS = {"Attention"}
"""Layers whose processing after loading touches no weights of an unquantized model."""
THREADS = 8
BUFFER = 1 << 26

Share = tuple[str, Rectangle, int]
"""A tensor, a part of it, and the digest of that part in one worker's memory."""


@dataclass(frozen=True)
class Copy:
    """Relate a rectangle of a checkpoint tensor to a view of this worker's memory, [rows, columns]."""

    source: Rectangle
    target: Tensor


class LoaderCopies:
    """Hold where each checkpoint tensor lies in this worker's memory."""

    def __init__(self, shapes: Mapping[str, list[int]], copies: Mapping[str, Sequence[Copy]]) -> None:
        self._shapes, self._copies = shapes, copies
        self._digests = Digests(next(iter(copies.values()))[0].target.device)

    @classmethod
    def record(
        cls, model: torch.nn.Module, shapes: Mapping[str, list[int]], dtype: torch.dtype
    ) -> "LoaderCopies":
        """Run the model's loader; raise ValueError if it does anything but copy rectangles."""
        sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        recorder = _Recorder(sources)
        with torch.no_grad(), recorder:
            model.load_weights(iter(sources.items()))
        if missing := sorted(shapes.keys() - recorder.copies.keys()):
            raise ValueError(f"its loader copies nothing of {missing[0]}")
        return cls(shapes, recorder.copies)

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy what this worker needs of full tensors, which are mapped files."""
        work = [
            (copy.target, _rectangle(tensors[name], copy.source))
            for name, copies in self._copies.items()
            for copy in copies
        ]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda part: _copy_in(work[part::THREADS]), range(THREADS)))

    def change(self, delta: Delta) -> None:
        """Change values in place."""
        for name, changes in delta.changes.items():
            self._change(name, changes)
        for name, tensor in delta.whole.items():
            for copy in self._copies[name]:
                copy.target.copy_(_rectangle(tensor, copy.source))

    def shares(self) -> list[Share]:
        """Return the digest of each rectangle in this worker's memory."""
        found = [(name, copy) for name, copies in self._copies.items() for copy in copies]
        values = torch.stack([self._digests.part(copy.target, copy.source) for _, copy in found]).tolist()
        return [(name, copy.source, value) for (name, copy), value in zip(found, values, strict=True)]

    def _change(self, name: str, changes: Changes) -> None:
        whole = Rectangle.whole(self._shapes[name])
        where, differences = changes.decode(whole.rows * whole.columns)
        rows, columns = where // whole.columns, where % whole.columns
        for copy in self._copies[name]:
            at = copy.source
            row, column, difference = rows - at.row, columns - at.column, differences
            if at != whole:
                inside = (row >= 0) & (row < at.rows) & (column >= 0) & (column < at.columns)
                row, column, difference = row[inside], column[inside], difference[inside]
            integers(copy.target)[row, column] += difference


def require_plain(model: torch.nn.Module) -> None:
    """Raise ValueError if a layer may derive other tensors from the weights that were loaded."""
    if derived := sorted(set(_derived(model))):
        raise ValueError(f"its weights are processed after loading by {', '.join(derived)}")


def sum_shares(shapes: Mapping[str, list[int]], shares: Iterable[Share]) -> dict[str, int]:
    """Add up the digests of all workers; raise ValueError unless their parts make up each tensor.

    Workers hold the same part twice where heads or norms are replicated; each copy must have the same digest.
    """
    parts: dict[str, dict[Rectangle, int]] = {name: {} for name in shapes}
    for name, at, value in shares:
        if parts[name].setdefault(at, value) != value:
            raise ValueError(f"{name}: two copies of the same part differ")
    for name, found in parts.items():
        whole = Rectangle.whole(shapes[name])
        if sum(at.rows * at.columns for at in found) != whole.rows * whole.columns:
            raise ValueError(f"{name}: workers do not hold each of its values exactly once")
    return {name: sum(found.values()) for name, found in parts.items()}


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Note the copies from tensors without data, and carry them out for none."""

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
        self._sources = sources
        self.copies: dict[str, list[Copy]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default or not args[1].is_meta:
            if func._schema.is_mutable and any(isinstance(arg, Tensor) and arg.is_meta for arg in args):
                raise ValueError(f"its loader calls {func} on a tensor of the checkpoint")
            return func(*args, **(kwargs or {}))
        target, part = args[0], args[1]
        name = self._names.get(part.untyped_storage()._cdata)
        if name is None or target.is_meta or (target.shape, target.dtype) != (part.shape, part.dtype):
            raise ValueError(f"its loader does not simply copy {name or 'a tensor that it computed'}")
        at = _locate(self._sources[name], part)
        self.copies.setdefault(name, []).append(Copy(at, _flat(target.detach(), at)))
        return target


def _derived(model: torch.nn.Module) -> Iterable[str]:
    """Yield the classes that may derive tensors from weights after loading."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and (type(method).__name__ not in PLAIN_METHODS or _is_on_cpu(module)):
            yield type(method).__name__
        if hasattr(module, "process_weights_after_loading") and type(module).__name__ not in PLAIN_LAYERS:
            yield type(module).__name__


def _is_on_cpu(module: torch.nn.Module) -> bool:
    """Tell whether a layer lies on a CPU, for which vLLM packs weights."""
    return any(parameter.device.type == "cpu" for parameter in module.parameters())


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
    """Tell whether the rows of a view follow one another in steps of `width`."""
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


def _copy_in(work: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy mapped tensors to the device, through one pinned buffer where that is a GPU."""
    if not work or not work[0][0].is_cuda:
        for target, source in work:
            target.copy_(source)
        return
    buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(work[0][0].device)
    with torch.cuda.stream(stream):
        for target, source in work:
            step = max(1, BUFFER // max(1, source[0].nbytes))
            for piece, place in zip(source.split(step), target.split(step), strict=True):
                part = buffer[: piece.numel() * piece.element_size()].view(piece.dtype).view(piece.shape)
                part.copy_(piece)
                place.copy_(part, non_blocking=True)
                stream.synchronize()
