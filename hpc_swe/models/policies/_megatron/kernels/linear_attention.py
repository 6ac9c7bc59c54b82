"""Compute what a gated delta net does over time by Triton kernels of fla-core; nothing else imports it.

delta_rule.py says what the functions return. The kernels read tensors in their own type, and keep states in
float32. Of Triton 3.4 to 3.7.0, of which torch 2.11 brings one, programs for Hopper compute one of the
gradients wrongly, and fla-core refuses it there. So it is computed here, chunk by chunk, in plain torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTH = 64
"""Tokens of a chunk, of which the kernels take one state each."""
CHUNKS = 32
"""Chunks that are computed at one time: with 32 heads of 128 they take 0.5 GB."""


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

    register(_is_refused())
    batch = (each[None] for each in (query, key, value, decay, rate))
    places = {"cu_seqlens": ends.on_device, "cu_seqlens_cpu": ends.on_host}
    outputs, _ = chunk_gated_delta_rule(*batch, use_qk_l2norm_in_kernel=True, **places)
    return outputs.squeeze(0)


@cache
def _is_refused() -> bool:
    """Return whether fla-core refuses one of its kernels with this GPU and this Triton."""
    from fla import utils

    return bool(utils.IS_NVIDIA_HOPPER and utils.TRITON_ABOVE_3_4_0 and not utils.TRITON_ABOVE_3_7_1)


@cache
def register(is_wanted: bool) -> None:
    """Let fla-core take `gradients_by_chunk` in place of its own kernel, or not."""
    from fla import backends

    class ByChunk(backends.BaseBackend):  # type: ignore[misc]
        backend_type = "hpc_swe"
        priority = 4  # before tilelang, which does not import beside the apache-tvm-ffi of flash-attn-4

        @classmethod
        def is_available(cls) -> bool:
            return is_wanted

        def chunk_bwd_dqkwg(self, **given: Tensor) -> tuple[Tensor, ...]:
            return gradients_by_chunk(given)

    backends.register("common")(ByChunk)


def gradients_by_chunk(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of q and k [1, tokens, groups, k], w [1, tokens, heads, k], and g.

    They are of the part of a chunk's output that its own tokens give, and of the state after it. By
    fla-core's names, v and its gradient dv are what tokens write, [1, tokens, heads, v], do the gradient of
    the output, h and dh [1, chunks, heads, k, v] the state before each chunk and the gradient of that after
    it, g [1, tokens, heads] the log2 of the decay since the chunk's start, and chunk_indices [chunks, 2] a
    chunk's sequence and its number there.
    """
    (_, tokens, groups, width), heads = given["q"].shape, given["v"].shape[2]
    chunks, ends, device = given["chunk_indices"].long(), given["cu_seqlens"].long(), given["q"].device
    sizes = (width, width, width, 1)
    # The last row takes what places without a token give.
    gradients = [torch.empty(tokens + 1, heads, size, device=device) for size in sizes]
    for part in torch.arange(len(chunks), device=device).split(CHUNKS):
        sequence, number = chunks[part].unbind(1)
        rows = (ends[sequence] + LENGTH * number)[:, None] + torch.arange(LENGTH, device=device)
        rows = torch.where(rows < ends[sequence + 1][:, None], rows, tokens)
        taken = {name: _taken(given[name][0], rows, heads) for name in ("q", "k", "v", "do", "dv")}
        total = _taken(given["g"][0, :, :, None], rows, heads)
        states = {name: given[name][0, part].float() for name in ("h", "dh")}
        is_there = (rows < tokens)[:, None, :, None]
        results = Chunks(**taken, **states, g=total, is_there=is_there).gradients(float(given["scale"]))
        for place, result in zip(gradients, results, strict=True):
            place[rows] = result.transpose(1, 2)
    of_q, of_k, of_w, of_g = (each[None, :tokens] for each in gradients)
    of_q, of_k = (each.unflatten(2, (groups, -1)).sum(3).to(given["q"].dtype) for each in (of_q, of_k))
    return of_q, of_k, of_w.to(given["w"].dtype), of_g.squeeze(3)


def _taken(states: Tensor, rows: Tensor, heads: int) -> Tensor:
    """Return [chunks, heads, LENGTH, d] of [tokens, heads or groups, d], zeros for the row after the last."""
    padded = torch.cat((states, states.new_zeros(1, *states.shape[1:])))[rows].float()
    return padded.repeat_interleave(heads // states.shape[1], 2).transpose(1, 2)


@dataclass(frozen=True)
class Chunks:
    """Hold some chunks in float32, [chunks, heads, LENGTH, d], with zeros where a sequence has ended."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dv: Tensor
    h: Tensor
    dh: Tensor
    g: Tensor
    is_there: Tensor
    """Whether a row has a token, [chunks, 1, LENGTH, 1]."""

    def gradients(self, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return those of q, k, w and g, each [chunks, heads, LENGTH, d]."""
        is_last = self.is_there & ~F.pad(self.is_there, (0, 0, -1, 1))
        last = (self.g * is_last).sum(2, keepdim=True)
        total = torch.where(self.is_there, self.g, last)
        is_later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=total.device).triu(1)
        between = (total - total.mT).masked_fill(is_later, -torch.inf).exp2()
        scores = self.do @ self.v.mT * between * scale
        of_q = self.do @ self.h.mT * total.exp2() * scale + scores @ self.k
        passed = self.v @ self.dh.mT * (last - total).exp2()
        of_k = passed + scores.mT @ self.q
        of_last = (self.h * self.dh).sum((2, 3)) * last[:, :, 0, 0].exp2() + (passed * self.k).sum((2, 3))
        of_g = (of_q * self.q - of_k * self.k).sum(3, keepdim=True) + is_last * of_last[:, :, None, None]
        return of_q, of_k, -(self.dv @ self.h.mT), of_g
