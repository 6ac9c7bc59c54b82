"""Move what training keeps on the GPU to host memory and back, for a learner that shares its GPUs."""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from hpc_swe.base.errors import NodeError
from hpc_swe.models.costs import GIB
from hpc_swe.models.policies._megatron.kernels import pinned
from hpc_swe.models.policies._megatron.model.parallel import TorchRanks

log = logging.getLogger(__name__)

REMEDY = "set hybrid = false, or spread the policy over more nodes"
WORKSPACES = 2**29
"""Bytes that PyTorch may well keep when all is released, for libraries that compute."""
FREED_S = 30.0
"""Longest wait for memory that other processes have freed, which the driver may give back late."""


@dataclass(frozen=True)
class _Emptied:
    storage: torch.UntypedStorage
    size: int
    host: Tensor | None
    """Its bytes, uint8; None for gradients, which become zeros."""


class Offload:
    """Empty the storages of weights, gradients and optimizer state, and fill them again.

    The tensors stay the same objects: every view of a storage sees it empty, then with its former content.
    Gradients are not kept, since each step begins with zeros. The host memory is kept for the next time, in
    one piece, which is pinned where there is a GPU. What the optimizer keeps in host memory stays there.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        others: Callable[[], Iterable[Tensor]],
        ranks: TorchRanks,
    ) -> None:
        self._ddp, self._optimizer, self._others, self._ranks = ddp, optimizer, others, ranks
        self._host: list[Tensor] = []
        """The place of each storage of the state, uint8."""
        self._emptied: list[_Emptied] = []

    def release(self) -> None:
        """Free the GPU's memory; until `restore` nothing may be computed. All ranks must call this together.

        Raise NodeError on all ranks where a host refuses the memory.
        """
        states = _storages(self._states())
        gradients = _storages(self._gradients())
        gradients = {key: storage for key, storage in gradients.items() if key not in states}
        self._make_room([storage.nbytes() for storage in states.values()])
        for storage, host in zip(states.values(), self._host, strict=True):
            host.copy_(_bytes(storage), non_blocking=True)
            self._emptied.append(_Emptied(storage, storage.nbytes(), host))
        self._emptied += [_Emptied(each, each.nbytes(), None) for each in gradients.values()]
        parallel_state.get_global_memory_buffer().buffer.clear()  # Megatron's, of gathered rows
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for each in self._emptied:
            each.storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            if torch.cuda.memory_reserved() > WORKSPACES:
                gc.collect()  # tensors may be held by cycles that Python has not looked at yet
                torch.cuda.empty_cache()
            kept = torch.cuda.memory_reserved() / GIB
            log.info("released: PyTorch keeps %.2f GiB, all processes together %.2f GiB", kept, used_gib())

    def restore(self) -> None:
        """Fill the storages again; without a `release` before it, do nothing.

        Raise NodeError if other processes leave too little memory on the GPU.
        """
        _await_room(sum(each.size for each in self._emptied))
        for each in self._emptied:
            each.storage.resize_(each.size)
            if each.host is None:
                _bytes(each.storage).zero_()
            else:
                _bytes(each.storage).copy_(each.host, non_blocking=True)
        self._emptied.clear()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _make_room(self, sizes: Sequence[int]) -> None:
        if any(self._ranks.gather([host.nbytes for host in self._host] != sizes)):
            self._host.clear()  # free it first
            room = pinned.take("hybrid = true", pinned.room_for(sizes), self._ranks, REMEDY)
            self._host = [room.place([size], torch.uint8) for size in sizes]

    def _states(self) -> Iterator[Tensor]:
        yield from self._others()
        yield from (parameter.data for parameter in self._ddp.parameters())
        yield from (buffer.param_data for buffer in self._buffers() if buffer.param_data is not None)
        for each in self._optimizer.chained_optimizers:
            for group in each.optimizer.param_groups:
                yield from (parameter.data for parameter in group["params"])
            for state in each.optimizer.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value) and value.numel() > 1)

    def _gradients(self) -> Iterator[Tensor]:
        return (buffer.grad_data for buffer in self._buffers())

    def _buffers(self) -> list[Any]:
        return [*self._ddp.buffers, *self._ddp.expert_parallel_buffers]


def used_gib() -> float | None:
    """Return how many GiB of this process's GPU all processes together use; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return float(total - free) / GIB


def _await_room(needed: int) -> None:
    if not torch.cuda.is_available():
        return
    until = time.monotonic() + FREED_S
    while (free := torch.cuda.mem_get_info()[0]) < needed:
        if time.monotonic() > until:
            raise NodeError(
                f"the learner's state needs {needed / GIB:.1f} GiB of its GPU, but other processes, such as "
                f"sleeping engines, leave {free / GIB:.1f} GiB; spread the policy over more GPUs, or give "
                "the engine fewer sequences (engine.max_num_seqs), or no CUDA graphs (--enforce-eager in "
                "engine.extra)"
            )
        time.sleep(0.1)


def _storages(tensors: Iterator[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the device's storages of some tensors by their address, but on a CPU none that numpy has seen.

    The size of such a storage is fixed from then on; a GPU has none of them.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {s._cdata: s for s in storages if s.device.type == device and s.resizable()}


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
