"""Compute what a gated delta net does over time by Triton kernels of fla-core; nothing else imports it.

delta_rule.py says what the functions return. The kernels read tensors in their own type, and keep states in
float32.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


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
    found, _ = causal_conv1d(states[None], weight.squeeze(1), activation="silu", **places)
    return found.squeeze(0)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, ends: Ends) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    batch = (each[None] for each in (query, key, value, decay, rate))
    places = {"cu_seqlens": ends.on_device, "cu_seqlens_cpu": ends.on_host}
    found, _ = chunk_gated_delta_rule(*batch, use_qk_l2norm_in_kernel=True, **places)
    return found.squeeze(0)
