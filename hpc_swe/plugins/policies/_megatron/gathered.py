"""Gather the optimizer's state for a checkpoint on the data-parallel ranks that write it.

Megatron's own method takes 36 bytes of host memory for each parameter of a rank on all ranks, and 8 of each
GPU. Here each rank gathers and writes the state of a part of the parameters, 12 bytes for each of them, in
pieces of fixed size. What a rank has alone is not copied: its writers take each tensor from where it is.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

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
    """Hold the values of some parameters of a buffer; other ranks have the rest."""

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        """Make room for parameters that lie from one index of the buffer to another one."""
        self._starts = sorted(start for start, _ in places)
        self._values = {start: torch.empty(end - start, dtype=torch.float32) for start, end in places}

    def __getitem__(self, place: slice) -> Tensor:
        """Return the values of the parameter that lies there, or its shape where another rank has them."""
        found = self._values.get(place.start)
        return super().__getitem__(place) if found is None else found

    def fill(self, first: int, values: Tensor) -> None:
        """Copy values that begin at the index `first` of the buffer; between parameters there is padding."""
        for start in self._starts[max(0, bisect_right(self._starts, first) - 1) :]:
            if start >= first + len(values):
                return
            held = self._values[start]
            low, high = max(first, start), min(first + len(values), start + len(held))
            if low < high:
                held[low - start : high - start] = values[low - first : high - first]


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
    """Return what get_parameter_state_dp_zero returns, with shapes for what other ranks write.

    With `empty_data` each rank gets shapes without values, as loaded.py needs them.
    """
    found: dict[Any, Any] = {"buckets_coalesced": True}
    written = {} if empty_data or self.data_parallel_group.size() == 1 else _places_to_write(self)
    for number, (buffer, ranges) in enumerate(zip(self.buffers, self.gbuf_ranges, strict=True)):
        [(dtype, buckets)] = ranges.items()
        if empty_data:
            found[number] = {dtype: dict.fromkeys(KEYS, Shapes())}
            continue
        if self.data_parallel_group.size() == 1:
            starts = {param: start for param, (start, _, _) in buffer.param_index_map.items()}
            parts = {at: self._get_main_param_and_optimizer_states(param) for param, at in starts.items()}
            own = {key: OwnParameters({at: part[key] for at, part in parts.items()}) for key in KEYS}
            found[number] = {dtype: own}
            continue
        whole = {key: ByParameter(written[number, key]) for key in KEYS}
        for bucket, of_rank in zip(buffer.buckets, buckets, strict=True):
            for key in KEYS:
                for first, values in _gathered(self, bucket.grad_data.numel(), of_rank["param_map"], key):
                    whole[key].fill(bucket.offset + first, values)
        found[number] = {dtype: whole}
    return found


def only_own(state: Mapping[int, Mapping[str, ShardedBase]]) -> dict[int, dict[str, ShardedBase]]:
    """Return the tensors that this rank has values of, marked as those to write, whichever rank it is.

    Megatron would save an empty dictionary, and take it for a state when it loads.
    """
    found: dict[int, dict[str, ShardedBase]] = {}
    for index, tensors in state.items():
        for key, each in tensors.items():
            if not each.data.is_meta:
                found.setdefault(index, {})[key] = replace(each, replica_id=(*each.replica_id[:-1], 0))
    return found


def _places_to_write(optimizer: DistributedOptimizer) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """Return where the tensors lie that this rank writes, by the number of the buffer and the key.

    A tied table of words counts on the last stage of a pipeline, too, though the first one writes it.
    """
    group = optimizer.data_parallel_group
    every = [
        (number, key, param, (start, end))
        for number, buffer in enumerate(optimizer.buffers)
        for param, (start, end, _) in buffer.param_index_map.items()
        for key in KEYS
    ]
    writers = share_out([param.numel() for _, _, param, _ in every], group.size())
    found: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for (number, key, _, place), writer in zip(every, writers, strict=True):
        places = found.setdefault((number, key), [])
        if writer == group.rank():
            places.append(place)
    return found


def _gathered(
    optimizer: DistributedOptimizer, length: int, of_rank: Mapping[Any, Any], key: str
) -> Iterator[tuple[int, Tensor]]:
    """Yield where pieces of a bucket begin, and their values, which the next pieces overwrite.

    All ranks have equally long shares of the bucket.
    """
    group, size = optimizer.data_parallel_group, optimizer.data_parallel_group.size()
    share, most = length // size, max(1, min(length, PIECE) // size)
    device = torch.cuda.current_device()
    own, every = (torch.zeros(count * most, dtype=torch.float32, device=device) for count in (1, size))
    for start in range(0, share, most):
        bounds = (start, min(share, start + most))
        for place, values in _values(optimizer, of_rank, key, bounds):
            own[place] = values
        pieces = [part[: bounds[1] - start] for part in every.split(most)]
        dist.all_gather(pieces, own[: bounds[1] - start], group)
        for rank, found in enumerate(pieces):
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
