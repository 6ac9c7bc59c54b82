"""Let backward recompute values that are cheaper to compute than to keep.

A layer calls `recompute(function, *inputs)` in place of `function(*inputs)`. Where autograd would save the
result for backward, it saves the function and its inputs. An input may be the result of such a call, too;
then it is not kept either, and backward computes the whole chain again, from the first value that was kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

Function = Callable[..., Any]
"""A function of tensors that returns one or a tuple of them, and keeps only its inputs for backward."""
Call = Callable[..., Any]
"""Calls a `Function`, its first argument, with the tensors that follow: `keep`, or a `Recomputing`."""


class Recomputation:
    """Recompute the results of a function; hold them from their first use in backward to the last."""

    def __init__(self, function: Function, inputs: list["RecomputedPart | Tensor"]) -> None:
        self._function, self._inputs = function, inputs
        self._results: tuple[Tensor, ...] | None = None
        self.uses = 0
        """Number of places that autograd saved a result for, and that have not taken it yet."""

    def results(self) -> tuple[Tensor, ...]:
        found = self._results
        if found is None:
            with torch.no_grad():
                found = _many(self._function(*(_tensor(each) for each in self._inputs)))
        self._results = found if self.uses else None
        return found

    def used(self) -> None:
        self.uses -= 1
        if not self.uses:
            self._results = None


@dataclass(frozen=True)
class RecomputedPart:
    """Locate a saved tensor in the memory of a recomputed result."""

    source: Recomputation
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Number of elements from the result's first to this one's first."""


class Recomputing:
    """Call functions whose results backward recomputes; valid for one forward pass of one layer.

    It recognizes a saved tensor by its storage. A weak reference to it does not hold the result's memory, and
    is never equal to one of a storage that is made later.
    """

    def __init__(self) -> None:
        self._known: dict[StorageWeakRef, tuple[Recomputation, int, int]] = {}
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> "Recomputing":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._known.clear()

    def __call__(self, function: Function, *inputs: Tensor) -> Any:
        outputs = function(*inputs)
        if not torch.is_grad_enabled():
            return outputs
        source = Recomputation(function, [self._find(each.detach()) for each in inputs])
        kept = {_storage(each) for each in inputs}
        for index, tensor in enumerate(_many(outputs)):
            if (storage := _storage(tensor)) not in kept:
                self._known[storage] = (source, index, tensor.storage_offset())
        return outputs

    def _find(self, tensor: Tensor) -> RecomputedPart | Tensor:
        source, index, first = self._known.get(_storage(tensor), (None, 0, 0))
        if source is None:
            return tensor
        offset = tensor.storage_offset() - first
        return RecomputedPart(source, index, tuple(tensor.size()), tensor.stride(), offset)

    def _pack(self, tensor: Tensor) -> RecomputedPart | Tensor:
        found = self._find(tensor)
        if isinstance(found, RecomputedPart):
            found.source.uses += 1
        return found

    @staticmethod
    def _unpack(saved: RecomputedPart | Tensor) -> Tensor:
        tensor = _tensor(saved)
        if isinstance(saved, RecomputedPart):
            saved.source.used()
        return tensor


def keep(function: Function, *inputs: Tensor) -> Any:
    """Call a function whose results are kept; the counterpart of `Recomputing`."""
    return function(*inputs)


def _tensor(saved: RecomputedPart | Tensor) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    whole = saved.source.results()[saved.index]
    return whole.as_strided(saved.size, saved.stride, whole.storage_offset() + saved.offset)


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _many(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
