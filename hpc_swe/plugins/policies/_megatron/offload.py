"""Move what training keeps on the device to host memory and back, for a learner that shares its GPUs."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor


class Offload:
    """Empty the storages of weights, gradients and optimizer state, and fill them again.

    The tensors stay the same objects: every view of a storage sees it empty, then with its former content.
    Gradients are not kept, since each step begins with zeros. The host memory is kept for the next time.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        others: Callable[[], Iterable[Tensor]],
    ) -> None:
        self._ddp, self._optimizer, self._others = ddp, optimizer, others
        self._host: dict[int, Tensor] = {}
        """Address of a storage's record -> its bytes, uint8, in pinned memory where there is a GPU."""
        self._emptied: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    def release(self) -> None:
        """Free the device's memory; until `restore` nothing may be computed."""
        kept = _storages(self._states())
        gradients = _storages(self._gradients())
        for key, storage in kept.items():
            if key not in self._host or self._host[key].nbytes != storage.nbytes():
                is_gpu = storage.device.type == "cuda"
                self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_gpu)
            self._host[key].copy_(_bytes(storage), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for key, storage in (gradients | kept).items():
            self._emptied.append((storage, storage.nbytes(), self._host[key] if key in kept else None))
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Fill the storages again; without a `release` before it, do nothing."""
        for storage, size, host in self._emptied:
            storage.resize_(size)
            if host is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(host, non_blocking=True)
        self._emptied.clear()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

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


def _storages(tensors: Iterator[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of some tensors by their address, without those of a CPU that numpy has seen.

    Their size is fixed from then on; a GPU has none of them.
    """
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages if storage.resizable()}


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
