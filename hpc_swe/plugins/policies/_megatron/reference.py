"""The initial weights in host memory, swapped in where the trained ones lie."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hpc_swe.plugins.policies._megatron.spec import PolicyModel


class Reference:
    """Takes twice the size of this rank's parameters in host memory, and none on the device."""

    def __init__(self, model: PolicyModel) -> None:
        self._parameters: list[Tensor] = [parameter.data for parameter in model.parameters()]
        self._initial = [_host_copy(data) for data in self._parameters]
        self._trained = [_host_copy(data) for data in self._parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the initial weights inside the block, and is as before after it."""
        for data, initial, trained in zip(self._parameters, self._initial, self._trained, strict=True):
            trained.copy_(data)
            data.copy_(initial)
        try:
            yield
        finally:
            for data, trained in zip(self._parameters, self._trained, strict=True):
                data.copy_(trained)


def _host_copy(data: Tensor) -> Tensor:
    copy = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
    return copy.copy_(data)
