"""Gather the optimizer's state for a checkpoint on the data-parallel ranks that write it.

Megatron's own method takes 36 bytes of host memory for each parameter of a rank on all ranks, and 8 of each
GPU. Here each rank writes the state of a part of the parameters, which it gathers in pieces of fixed size.
What a rank has alone is written from where it is.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from hpc_swe.models.policies._megatron.state.checkpoint_files import CheckpointFiles
from hpc_swe.models.policies._megatron.weights.tensor_writer import TensorWriter

KEYS = ("param", "exp_avg", "exp_avg_sq")
"""Tensors of a parameter's state, all in float32."""
PIECE = 16 * 2**20
"""Values of all ranks that are gathered at one time."""


class OwnParameters:
    """Stand for a buffer of which only the slices of whole parameters are read, where this rank has them."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        """Take the tensor of each parameter, by the index of its first value."""
        self._tensors = tensors

    def __getitem__(self, place: slice) -> Tensor:
        return self._tensors[place.start].detach().reshape(-1)


class Shapes:
    """Stand for a buffer whose slices have no values, and take no memory."""

    def __getitem__(self, place: slice) -> Tensor:
        return torch.empty(place.stop - place.start, dtype=torch.float32, device="meta")


class ByParameter(Shapes):
    """Stand for a buffer of which this rank writes some parameters, and others the rest."""

    def __init__(self, size: int, own: Container[int]) -> None:
        """Take the number of values, and the index of the first one of each parameter of this rank."""
        self.whole, self._own = torch.empty(size, dtype=torch.float32, device="meta"), own

    def __getitem__(self, place: slice) -> Tensor:
        """Return a part of `whole`, or only its shape where another rank writes it."""
        return self.whole[place] if place.start in self._own else super().__getitem__(place)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a part of `whole`."""
        return bool(tensor.untyped_storage()._cdata == self.whole.untyped_storage()._cdata)


def share_out(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return which rank writes each tensor, so that all ranks write about as many values."""
    loads, found = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        found[index] = loads.index(min(loads))
        loads[found[index]] += sizes[index]
    return found


def gather_states(
    self: DistributedOptimizer,
    use_gloo_comm: bool = True,
    empty_data: bool = False,
    return_on_all_ranks: bool = False,
) -> dict[Any, Any]:
    """Return what get_parameter_state_dp_zero returns, with shapes for values that ranks share.

    `write` gathers these. With `empty_data` each rank gets shapes alone, as loaded.py needs them.
    """
    found: dict[Any, Any] = {"buckets_coalesced": True}
    shared = {} if empty_data or self.data_parallel_group.size() == 1 else _to_write(self)
    self.shared = shared  # for `write`
    for number, (buffer, ranges) in enumerate(zip(self.buffers, self.gbuf_ranges, strict=True)):
        [dtype] = ranges
        if empty_data:
            found[number] = {dtype: dict.fromkeys(KEYS, Shapes())}
            continue
        if self.data_parallel_group.size() == 1:
            starts = {param: start for param, (start, _, _) in buffer.param_index_map.items()}
            parts = {at: self._get_main_param_and_optimizer_states(param) for param, at in starts.items()}
            own = {key: OwnParameters({at: part[key] for at, part in parts.items()}) for key in KEYS}
            found[number] = {dtype: own}
            continue
        found[number] = {dtype: {key: shared[number, key] for key in KEYS}}
    return found


def write(optimizer: DistributedOptimizer, files: CheckpointFiles, writer: TensorWriter) -> None:
    """Gather what ranks share, and write this rank's parts of it. All ranks must call this together."""
    if not optimizer.shared:
        return
    for number, (buffer, ranges) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
        [buckets] = ranges.values()
        for key in KEYS:
            places = files.shared(optimizer.shared[number, key].whole)
            for bucket, of_rank in zip(buffer.buckets, buckets, strict=True):
                for first, values in _gathered(optimizer, bucket, of_rank["param_map"], key):
                    places.write(bucket.offset + first, values, writer)


def only_own(
    optimizer: DistributedOptimizer, state: Mapping[int, Mapping[str, ShardedBase]]
) -> dict[int, dict[str, ShardedBase]]:
    """Return the tensors that this rank writes, marked as those to write, whichever rank it is.

    Megatron would save an empty dictionary, and take it for a state when it loads.
    """
    found: dict[int, dict[str, ShardedBase]] = {}
    for index, tensors in state.items():
        for key, each in tensors.items():
            if not each.data.is_meta or any(part.has(each.data) for part in optimizer.shared.values()):
                found.setdefault(index, {})[key] = replace(each, replica_id=(*each.replica_id[:-1], 0))
    return found


def _to_write(optimizer: DistributedOptimizer) -> dict[tuple[int, str], ByParameter]:
    """Return what this rank writes of each buffer, by its number and the key.

    A tied table of words counts on the last stage of a pipeline, too, though the first one writes it.
    """
    group = optimizer.data_parallel_group
    every = [
        (number, key, param, start)
        for number, buffer in enumerate(optimizer.buffers)
        for param, (start, _, _) in buffer.param_index_map.items()
        for key in KEYS
    ]
    writers = share_out([param.numel() for _, _, param, _ in every], group.size())
    own = {each[:2]: set[int]() for each in every}
    for (number, key, _, start), writer in zip(every, writers, strict=True):
        if writer == group.rank():
            own[number, key].add(start)
    return {
        (number, key): ByParameter(optimizer.buffers[number].numel, starts)
        for (number, key), starts in own.items()
    }


def _gathered(
    optimizer: DistributedOptimizer, bucket: Any, of_rank: Mapping[Any, Any], key: str
) -> Iterator[tuple[int, Tensor]]:
    """Yield where pieces of a bucket begin in it, and their values, which the next pieces overwrite.

    All ranks have equally long shares of the bucket.
    """
    group, size = optimizer.data_parallel_group, optimizer.data_parallel_group.size()
    share, device = bucket.grad_data.numel() // size, torch.cuda.current_device()
    most = max(1, min(share, PIECE // size))
    own, every = (torch.zeros(count * most, dtype=torch.float32, device=device) for count in (1, size))
    for start in range(0, share, most):
        bounds = (start, min(share, start + most))
        for place, values in _values(optimizer, of_rank, key, bounds):
            own[place] = values
        count = bounds[1] - start
        dist.all_gather_into_tensor(every[: size * count], own[:count], group)
        for rank, found in enumerate(every[: size * count].split(count)):
            yield rank * share + start, found


def _values(
    optimizer: DistributedOptimizer, of_rank: Mapping[Any, Any], key: str, bounds: tuple[int, int]
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the values of a rank's share within some bounds, with their places relative to the first."""
    start, end = bounds
    for param, ranges in of_rank.items():
        local = ranges["gbuf_local"]
        first, last = max(start, local.start), min(end, local.end)
        if first < last:
            state = optimizer._get_main_param_and_optimizer_states(param)[key].detach().view(-1)
            yield slice(first - start, last - start), state[first - local.start : last - local.start]
