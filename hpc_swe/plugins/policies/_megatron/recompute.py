"""Let backward make values again that are cheaper to compute than to keep.

A layer calls `again(function, *inputs)` in place of `function(*inputs)`. Where autograd would save the result
for backward, it saves the recipe: the function and its inputs. An input that `again` made is a recipe, too,
so that a chain of functions is made again from the first value that was kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Make = Callable[..., Any]
"""A function of tensors that returns one or a tuple of them, and keeps only its inputs for backward."""


class Remaking:
    """Make the results of a function again; hold them from their first use in backward to the last."""

    def __init__(self, function: Make, inputs: list["RemadePart | Tensor"]) -> None:
        self._function, self._inputs = function, inputs
        self._made: tuple[Tensor, ...] | None = None
        self.uses = 0
        """Number of places that autograd saved a result for, and that have not taken it yet."""

    def results(self) -> tuple[Tensor, ...]:
        made = self._made
        if made is None:
            with torch.no_grad():
                made = _many(self._function(*(_tensor(each) for each in self._inputs)))
        self._made = made if self.uses else None
        return made

    def used(self) -> None:
        self.uses -= 1
        if not self.uses:
            self._made = None


@dataclass(frozen=True)
class RemadePart:
    """Locate a saved tensor in the memory of a recipe's result."""

    recipe: Remaking
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Number of elements from the result's first to this one's first."""


class Again:
    """Call functions whose results backward makes again; valid for one forward pass of one layer.

    It holds all results until it is left, because it recognizes a saved tensor by its memory.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Remaking, int, Tensor]] = {}
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> "Again":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._made.clear()

    def __call__(self, function: Make, *inputs: Tensor) -> Any:
        outputs = function(*inputs)
        if not torch.is_grad_enabled():
            return outputs
        recipe = Remaking(function, [self._find(each.detach()) for each in inputs])
        kept = {_address(each) for each in inputs}
        for index, tensor in enumerate(_many(outputs)):
            if _address(tensor) not in kept:
                self._made[_address(tensor)] = (recipe, index, tensor.detach())
        return outputs

    def _find(self, tensor: Tensor) -> RemadePart | Tensor:
        recipe, index, whole = self._made.get(_address(tensor), (None, 0, tensor))
        if recipe is None:
            return tensor
        offset = tensor.storage_offset() - whole.storage_offset()
        return RemadePart(recipe, index, tuple(tensor.size()), tensor.stride(), offset)

    def _pack(self, tensor: Tensor) -> RemadePart | Tensor:
        found = self._find(tensor)
        if isinstance(found, RemadePart):
            found.recipe.uses += 1
        return found

    @staticmethod
    def _unpack(saved: RemadePart | Tensor) -> Tensor:
        tensor = _tensor(saved)
        if isinstance(saved, RemadePart):
            saved.recipe.used()
        return tensor


def once(function: Make, *inputs: Tensor) -> Any:
    """Call a function whose results are kept; the counterpart of `Again`."""
    return function(*inputs)


def _tensor(saved: RemadePart | Tensor) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    whole = saved.recipe.results()[saved.index]
    return whole.as_strided(saved.size, saved.stride, whole.storage_offset() + saved.offset)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()  # type: ignore[no-any-return]


def _many(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
