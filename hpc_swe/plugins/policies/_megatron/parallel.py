"""Joins the process group, and splits it into tensor times data parallel.

Objects and signals travel over gloo, also beside NCCL: a wait for a batch must not spin on the GPU
nor run into NCCL's watchdog.
"""

import os
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from hpc_swe.errors import ConfigError
from hpc_swe.plugins.policies._megatron import compat, cpu

T = TypeVar("T")


class TorchRanks:
    """This process among those that train together."""

    def __init__(self, tensor_size: int) -> None:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size % tensor_size:
            raise ConfigError(
                f"[policy] tensor_parallel = {tensor_size} does not divide the learner's {size} processes"
            )
        _join()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
        # Dropout is 0 and weights come from files, so no CUDA random state is needed: the no-op tracker.
        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.data_rank: int = self.data_group.rank()

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value in order of ranks, on every rank."""
        found: list[T] = [value] * self.size
        dist.all_gather_object(found, value)
        return found

    def close(self) -> None:
        """Leave the group."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def device() -> torch.device:
    """Where this process computes."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _join() -> None:
    compat.apply()
    if torch.cuda.is_available():
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # lets reductions overlap with products
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        cpu.apply()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(hours=1)
    if dist.is_initialized():
        return  # by a program around us
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:  # started by hand, alone: no port is needed
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
