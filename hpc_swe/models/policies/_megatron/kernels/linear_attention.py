"""Compute what a gated delta net does over time by Triton kernels of fla-core; nothing else imports it.

delta_rule.py says what the functions return. The kernels read tensors in their own type, and keep states in
float32. Of Triton 3.4 to 3.7.0, of which torch 2.11 brings one, programs for Hopper compute one of the
gradients wrongly in tiles of 64, and fla-core refuses it there at all widths. Its tiles are of 128, which are
computed rightly, where heads are wider than 64, as those of all published models are.
"""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

NARROW = 64
"""Widest head of which a tile on Hopper is not of 128."""


@dataclass(frozen=True)
class Ends:
    """Hold where the sequences of a pack end, int32 [sequences + 1] with a 0 before the ends."""

    on_device: Tensor
    on_host: Tensor
    """The same, so that the host need not wait for the device."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Ends":
        host = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        pinned = host.pin_memory() if device.type == "cuda" else host
        return cls(pinned.to(device, non_blocking=True), host)


def convolved(states: Tensor, weight: Tensor, ends: Ends) -> Tensor:
    from fla.modules.causal_conv1d import causal_conv1d  # needs Triton

    places = {"cu_seqlens": ends.on_device, "cu_seqlens_cpu": ends.on_host}
    outputs, _ = causal_conv1d(states[None], weight.squeeze(1), activation="silu", **places)
    return outputs.squeeze(0)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, ends: Ends) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    if min(query.shape[-1], value.shape[-1]) > NARROW:
        _allow_wide_tiles()
    batch = (each[None] for each in (query, key, value, decay, rate))
    places = {"cu_seqlens": ends.on_device, "cu_seqlens_cpu": ends.on_host}
    outputs, _ = chunk_gated_delta_rule(*batch, use_qk_l2norm_in_kernel=True, **places)
    return outputs.squeeze(0)


@cache
def _allow_wide_tiles() -> None:
    """Let fla-core compute gradients of tiles of 128 where it refuses them, too."""
    from fla.ops.common import chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True
