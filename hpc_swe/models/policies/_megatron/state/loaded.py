"""Load the optimizer's state from a checkpoint in pieces.

Megatron asks for the whole state of each parameter that a rank holds, 12 bytes a parameter on every rank, and
then takes what the rank updates. Here a rank asks for no parameter of which it updates nothing, and its host
memory holds one piece of the state at a time. A tensor that is larger than a piece is loaded by rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader

from hpc_swe.models.policies._megatron.state.saved_rows import RowReader
from hpc_swe.models.policies.base import Ranks

PIECES = 32
"""Pieces of about equal size in which a rank loads its state."""
SMALLEST = 2**16
"""Bytes of a piece at least: each takes all ranks a round of messages."""


@dataclass(frozen=True)
class SavedTensor:
    """Locate a tensor of the checkpoint of which this rank needs a part."""

    optimizer: DistributedOptimizer
    weight: nn.Parameter
    key: str
    """Which state of the weight it is."""
    part: slice
    """The values that this rank updates, of the flattened tensor."""
    saved: ShardedBase
    """Its data has a shape and no values."""
    first: int = 0
    """Where this part begins among the values of the weight that this rank updates."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of host memory that it takes while it is loaded."""
        return int(self.saved.data.nbytes)

    def with_room(self) -> ShardedBase:
        """Return the tensor with host memory to load it into."""
        return replace(self.saved, data=torch.empty_like(self.saved.data, device="cpu"))

    def take(self, values: Tensor) -> None:
        """Copy this rank's part of the loaded tensor into the optimizer."""
        own = self.optimizer._get_main_param_and_optimizer_states(self.weight)[self.key].detach().view(-1)
        part = values.flatten()[self.part]
        own[self.first : self.first + len(part)].copy_(part)

    def split(self, limit: int) -> Iterator["SavedTensor"]:
        """Yield the rows of which this rank updates values, as tensors of about `limit` bytes at most.

        What has no rows, as the halves of a gated layer, stays whole.
        """
        whole, wanted = self.saved, self.part
        if self.nbytes <= limit or not isinstance(whole, ShardedTensor) or whole.prepend_axis_num:
            yield self
            return
        width, rows = whole.data[0].numel(), max(1, limit // whole.data[0].nbytes)
        for row in range(wanted.start // width, -(-wanted.stop // width), rows):
            data = whole.data[row : row + rows]
            saved = replace(
                whole,
                data=data,
                local_shape=tuple(data.shape),
                global_offset=(whole.global_offset[0] + row, *whole.global_offset[1:]),
                axis_fragmentations=None,
            )
            start, end = row * width, row * width + data.numel()
            low, high = max(wanted.start, start), min(wanted.stop, end)
            part, first = slice(low - start, high - start), self.first + low - wanted.start
            yield replace(self, saved=saved, part=part, first=first)


def needed(
    optimizer: DistributedOptimizer, saved: Mapping[int, Mapping[str, ShardedBase]]
) -> Iterator[SavedTensor]:
    """Yield what this rank needs of the saved state, which is described in the order of buffers."""
    index = 0
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        [buckets] = ranges.values()
        updated = {weight: places for bucket in buckets for weight, places in bucket["param_map"].items()}
        for weight in buffer.param_index_map:
            if weight in updated:
                part = slice(updated[weight]["param"].start, updated[weight]["param"].end)
                for key, tensor in saved[index].items():
                    yield SavedTensor(optimizer, weight, key, part, tensor)
            index += 1


def divide(tensors: Sequence[SavedTensor]) -> list[list[SavedTensor]]:
    """Divide tensors into pieces, none larger than the limit unless it is a single tensor without rows."""
    limit = max(SMALLEST, sum(each.nbytes for each in tensors) // PIECES)
    pieces: list[list[SavedTensor]] = []
    left = 0
    for each in (part for tensor in tensors for part in tensor.split(limit)):
        if not pieces or each.nbytes > left:
            pieces.append([])
            left = limit
        pieces[-1].append(each)
        left -= each.nbytes
    return pieces


def load(tensors: Sequence[SavedTensor], folder: Path, ranks: Ranks) -> None:
    """Load tensors into their optimizers. All ranks must call this together, each with its own tensors."""
    pieces, reader = divide(tensors), RowReader(folder)
    for index in range(max(ranks.gather(len(pieces)))):
        _load_piece(pieces[index] if index < len(pieces) else [], reader)


def _load_piece(piece: Sequence[SavedTensor], reader: StorageReader) -> None:
    """Load some tensors without dist_checkpointing.load, which asks for all shards of a tensor.

    Its form of them says that shards that a rank does not load are the next rank's, and fails where there is
    one rank (strategies/torch.py:223).
    """
    wanted = [each.with_room() for each in piece]
    shards = [each.build() if isinstance(each, ShardedTensorFactory) else each for each in wanted]
    by_key: dict[str, list[CheckpointableShardedTensor]] = {}
    for shard in nested_values(shards):
        by_key.setdefault(shard.key, []).append(_for_torch(shard))
    checkpoint.load(
        {key: LocalShardsContainer(every) for key, every in by_key.items()},
        storage_reader=reader,
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    dict_list_map_inplace(lambda shard: shard.data, shards)
    for each, form, values in zip(piece, wanted, shards, strict=True):
        each.take(form.merge_fn(values) if isinstance(form, ShardedTensorFactory) else values)


def _for_torch(shard: ShardedTensor) -> CheckpointableShardedTensor:
    data = shard.data.view((1,) * shard.prepend_axis_num + tuple(shard.local_shape))
    plain = replace(shard, data=data, local_shape=tuple(data.shape), prepend_axis_num=0)
    return CheckpointableShardedTensor.from_sh_ten(plain)
