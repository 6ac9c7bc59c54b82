"""Make random weights on the device, so that a benchmark of a large shape needs no files.

A tensor depends on its name alone. So every back end, every rank and every process gets the same model, and
the losses of two back ends can be compared.
"""

import zlib

import torch
from torch import Tensor

from hpc_swe.plugins.model_shape import ModelShape

STD = 0.02  # the initializer_range of Qwen3


class RandomWeights:
    """Stand in for the files of a Hugging Face folder: `weights[name]` is a new tensor on the device."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device

    def __getitem__(self, name: str) -> Tensor:
        """Return norms of ones, biases of zeros, and matrices of normal numbers rounded to the dtype."""
        size = self._size(name)
        if len(size) == 1:
            make = torch.zeros if name.endswith(".bias") else torch.ones
            return make(size, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return torch.empty(size, dtype=self._dtype, device=self._device).normal_(0, STD, generator=generator)

    def _size(self, name: str) -> tuple[int, ...]:
        shape, kind = self._shape, name.split(".")[-2]
        heads, groups = shape.heads * shape.head_dim, shape.groups * shape.head_dim
        rows = {"q_proj": heads, "k_proj": groups, "v_proj": groups}
        if kind in rows:
            return (rows[kind], shape.hidden) if name.endswith(".weight") else (rows[kind],)
        sizes = {
            "o_proj": (shape.hidden, heads),
            "gate_proj": (shape.ffn, shape.hidden),
            "up_proj": (shape.ffn, shape.hidden),
            "down_proj": (shape.hidden, shape.ffn),
            "gate": (shape.experts, shape.hidden),
            "q_norm": (shape.head_dim,),
            "k_norm": (shape.head_dim,),
            "embed_tokens": (shape.vocab, shape.hidden),
            "lm_head": (shape.vocab, shape.hidden),
        }
        return sizes.get(kind, (shape.hidden,))
