"""Merge low-rank adapters into weights; those of bfloat16 numbers to the same bits on every device.

A product of bfloat16 numbers is exact in float64, and so, but for far-apart exponents, is their sum over the
rank. So learner and engine round the same sum, whatever the order in which their devices add, and whichever
part of a matrix they hold. Digests of the merged weights find the rare exception. A sum of products of
float32 numbers is rounded in float64, and its last bits depend on the order: no engine may have to repeat it.
"""

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a folder of adapters, as PEFT names them."""
PIECE = 1 << 24
"""Numbers that are merged at one time, in float64."""


@dataclass(frozen=True)
class Factors:
    """Hold the adapters of one matrix, or of a part of it: W = round(W0 + scale * b a)."""

    a: Tensor
    """[rank, inputs]."""
    b: Tensor
    """[outputs, rank]."""
    scale: float

    def merge(self, base: Tensor, target: Tensor) -> None:
        """Write the merged weights [outputs, inputs] into `target`; `base` may be the same tensor."""
        a, b = self.a.double(), self.b.double()
        step = max(1, PIECE // a.shape[1])
        for place, piece, part in zip(target.split(step), base.split(step), b.split(step), strict=True):
            piece = piece.to(a.device, non_blocking=True).double()
            place.copy_(torch.addmm(piece, part, a, alpha=self.scale))


def initial(name: str, rank: int, inputs: int) -> Tensor:
    """Draw a new factor a [rank, inputs] of the matrix `name`; b begins with 0.

    It is uniform within 1 / sqrt(inputs), as LoRA's authors draw it (microsoft/LoRA, layers.py). The numbers
    depend on the name alone, and not on how many ranks share them.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(rank, inputs).uniform_(-1, 1, generator=generator) / math.sqrt(inputs)
