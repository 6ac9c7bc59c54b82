"""The reference weights in host memory, swapped in where the trained ones lie."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hpc_swe.plugins.policies._megatron.spec import PolicyModel


class Reference:
    """Keeps the model's weights of now; twice their size in host memory, nothing on the device."""

    def __init__(self, model: PolicyModel) -> None:
        self._parameters = list(model.parameters())
        self._reference = [_host_copy(parameter.data) for parameter in self._parameters]
        self._trained = [_host_copy(parameter.data) for parameter in self._parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the reference inside the block, and is as before after it."""
        lists = (self._parameters, self._reference, self._trained)
        for parameter, reference, trained in zip(*lists, strict=True):
            trained.copy_(parameter.data)
            parameter.data.copy_(reference)
        try:
            yield
        finally:
            for parameter, _, trained in zip(*lists, strict=True):
                parameter.data.copy_(trained)


def _host_copy(data: Tensor) -> Tensor:
    copy = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
    return copy.copy_(data)
