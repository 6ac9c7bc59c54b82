"""Make random weights on the device, so that a benchmark of a large shape needs no files.

A tensor depends on its name alone. So every back end, every rank and every process gets the same model, and
the losses of two back ends can be compared.
"""

import zlib

import torch
from torch import Tensor

from hpc_swe.models.model_shape import ModelShape

STD = 0.02  # the initializer_range of Qwen3


class RandomWeights:
    """Stand in for the files of a Hugging Face folder: `weights[name]` is a new tensor on the device."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self._sizes, self._dtype, self._device = shape.tensors, dtype, device

    def __contains__(self, name: object) -> bool:
        return name in self._sizes

    def __getitem__(self, name: str) -> Tensor:
        """Return norms of ones, biases of zeros, and matrices of normal numbers rounded to the dtype."""
        size = self._sizes[name]
        if len(size) == 1:
            make = torch.zeros if name.endswith(".bias") else torch.ones
            return make(size, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return torch.empty(size, dtype=self._dtype, device=self._device).normal_(0, STD, generator=generator)
