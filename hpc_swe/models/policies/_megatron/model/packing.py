"""Convert a microbatch to tensors: its sequences lie one after another, without a batch dimension."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_swe.base.errors import ProtocolError
from hpc_swe.base.records import MicroBatch, float_array
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron.kernels.delta_rule import Borders
from hpc_swe.models.policies._megatron.kernels.flash_attention import Facts, Kernels, choose
from hpc_swe.models.policies._megatron.kernels.linear_attention import Ends
from hpc_swe.models.policies._megatron.model.frequencies import frequencies
from hpc_swe.models.policies._megatron.model.parallel import device
from hpc_swe.models.policies.base import TrainedTokens

SHORT = 2048
"""Number of tokens below which a sequence shares an attention kernel with its neighbours, beside cuDNN's."""


@dataclass(frozen=True)
class Block:
    """Describe consecutive sequences of a pack whose attention one kernel computes."""

    lengths: tuple[int, ...]
    ends: Tensor | None = None
    """int32 [sequences + 1], where the sequences end, with a 0 before these; None for a kernel that takes one
    sequence."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True)
class Packing:
    """Describe the sequences of a packed microbatch, in place of Megatron's PackedSeqParams.

    The host knows all lengths, so no kernel has to wait for the GPU.
    """

    borders: Borders
    """Of the sequences, padding as one more; their lengths' sum is the number of tokens."""
    kernels: Kernels
    """What computes attention."""
    blocks: list[Block]
    """The same sequences, grouped for these kernels."""
    cosines: Tensor
    """[tokens, 1, n], of the angles of this rank's tokens, by their positions in their sequences."""
    sines: Tensor
    query_scales: Tensor | None
    """float32 [tokens, 1, 1], factors of queries; None where all are 1."""
    rows: Tensor
    """int64 [n], positions among this rank's tokens whose next token is trained."""
    targets: Tensor
    """int64 [n], those next tokens."""
    experts: Tensor | None = None
    """uint8 [tokens, layers, k], see `routing`; None leaves the choice to the routers."""
    longest: int = 0
    """Most tokens that a layer of any rank has in this pass; 0 if all have as many as this one."""
    trained: int = 0
    """Number of trained tokens of the microbatch; with context parallelism this rank has a part of them."""
    trained_before: int = 0
    """Number of trained tokens that ranks before this one have."""
    qkv_format: str = field(default="thd", init=False)


class Packer:
    """Pack microbatches on the device of this rank, which has part `rank` of `parts` of their tokens."""

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, multiple: int, *, rank: int = 0, parts: int = 1
    ) -> None:
        self.facts = Facts.find(dtype, shape.head_dim)
        self.kernels = choose(self.facts)
        self._has_kernels = shape.delta is not None and self.kernels != "torch"
        self._dtype, self._multiple, self._rope = dtype, multiple * parts, shape.rope
        self._rank, self._parts = rank, parts
        self._frequencies = frequencies(shape.rope, shape.head_dim).to(device())

    def pack(
        self, token_ids: NDArray[np.int32], lengths: Sequence[int], trained: NDArray[np.integer]
    ) -> tuple[Tensor, Packing]:
        """Return this rank's token ids [1, tokens / parts] of the padded microbatch, and their packing.

        `trained` are the positions of the tokens to predict, in order; none may be the first of its sequence.
        """
        part = self.part_of(len(token_ids))
        missing = part * self._parts - len(token_ids)
        padded = [*lengths, missing] if missing else list(lengths)
        ids = np.pad(token_ids.astype(np.int64), (0, missing))
        positions = np.concatenate([np.arange(length, dtype=np.float32) for length in padded])
        angles = upload(positions)[:, None] * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        mine = slice(self._rank * part, (self._rank + 1) * part)
        angles, scale = angles[mine], self._rope.attention_factor
        first, last = np.searchsorted(trained, np.array([self._rank, self._rank + 1]) * part + 1).tolist()
        own = trained[first:last]
        packing = Packing(
            borders=Borders(padded, Ends.of(padded, device()) if self._has_kernels else None),
            kernels=self.kernels,
            blocks=self._blocks(padded),
            cosines=(angles.cos() * scale).to(self._dtype),
            sines=(angles.sin() * scale).to(self._dtype),
            query_scales=self._query_scales(positions, mine),
            rows=upload(own.astype(np.int64) - 1 - self._rank * part),
            targets=upload(ids[own]),
            trained=len(trained),
            trained_before=first,
        )
        return upload(ids[mine])[None], packing

    def _query_scales(self, positions: NDArray[np.float32], mine: slice) -> Tensor | None:
        rope = self._rope
        if not rope.query_beta or positions.max() < rope.original_length:
            return None
        turns = (upload(positions[mine]) / rope.original_length).floor()
        return (1 + rope.query_beta * torch.log(1 + turns))[:, None, None]

    def part_of(self, tokens: int) -> int:
        """Return how many tokens each rank has of a microbatch of so many, with padding."""
        return max(1, -(-tokens // self._multiple)) * self._multiple // self._parts

    def _blocks(self, lengths: Sequence[int]) -> list[Block]:
        found = []
        for group in grouped(lengths, self.kernels):
            is_varlen = len(group) > 1 or self.kernels == "flash-attn-4"
            ends = np.cumsum([0, *group], dtype=np.int32)
            found.append(Block(group, upload(ends) if is_varlen else None))
        return found


def grouped(lengths: Sequence[int], kernels: Kernels) -> list[tuple[int, ...]]:
    """Group consecutive sequences for calls of attention.

    flash-attn-4 takes all in one. cuDNN takes one of SHORT tokens or more, and shorter neighbours go together
    to another kernel.
    """
    if kernels == "flash-attn-4":
        return [tuple(lengths)]
    if kernels == "torch":
        return [(length,) for length in lengths]
    runs = [tuple(run) for _, run in groupby(lengths, lambda length: length < SHORT)]
    return [group for run in runs for group in ([run] if run[0] < SHORT else [(each,) for each in run])]


def trained_positions(micro: MicroBatch, where: str) -> NDArray[np.integer]:
    """Return the positions to train; raise ProtocolError if one starts its sequence, or if arrays differ."""
    total, mask = sum(micro.sequence_lengths), micro.mask_array
    sizes = {len(mask), *(len(data) // 4 for data in (micro.token_ids, micro.logprobs, micro.weights))}
    if sizes | {len(micro.advantages) // 4} != {total}:
        raise ProtocolError(f"{where}: arrays of {sorted(sizes)} tokens, sequence lengths sum to {total}")
    starts = np.cumsum([0, *micro.sequence_lengths])[:-1]
    for start in starts[starts < total]:
        if mask[start]:
            raise ProtocolError(f"{where}: token {start} is the first of its sequence and cannot be trained")
    return np.flatnonzero(mask)


def terms(
    micro: MicroBatch,
    trained: NDArray[np.integer],
    model: tuple[Tensor, Tensor],
    reference: Tensor | None,
    proximal: Tensor | None,
) -> TrainedTokens:
    """Build the input of the objective; `model` are log-probabilities and entropies of the trained tokens."""
    sampler, advantages, weights = (
        upload(float_array(data)[trained]) for data in (micro.logprobs, micro.advantages, micro.weights)
    )
    lengths = micro.sequence_lengths
    sequence = upload(np.repeat(np.arange(len(lengths)), lengths)[trained])
    return TrainedTokens(*model, sampler, advantages, weights, reference, proximal, sequence, len(lengths))


def upload(array: NDArray[np.generic]) -> Tensor:
    """Copy an array to the device of this process; the host does not wait for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array).copy())
    return tensor.pin_memory().to(device(), non_blocking=True) if torch.cuda.is_available() else tensor
