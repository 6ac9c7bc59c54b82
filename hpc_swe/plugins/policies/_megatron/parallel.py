"""Join the process group, and split it into groups: tensor, context, data and pipeline, from near to far.

Python objects travel over gloo, also where tensors use NCCL: a rank that waits for a batch must neither
spin on the GPU nor trigger NCCL's watchdog.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from hpc_swe.errors import ConfigError
from hpc_swe.plugins.policies._megatron import compat
from hpc_swe.plugins.policies._megatron.settings import MegatronSettings
from hpc_swe.processes import MEETING

T = TypeVar("T")
TIMEOUT = timedelta(hours=1)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchRanks:
    """Connect this process with those that train with it. Implements `Ranks` of plugins/policies/base.py."""

    def __init__(self, settings: MegatronSettings) -> None:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size % settings.processes:
            raise ConfigError(
                "[policy] tensor_parallel * pipeline_parallel * context_parallel = "
                f"{settings.processes} does not divide the learner's {size} processes"
            )
        settings.check_processes(size // settings.processes)
        _join(size)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.tensor_parallel,
            pipeline_model_parallel_size=settings.pipeline_parallel,
            context_parallel_size=settings.context_parallel,
            expert_model_parallel_size=settings.expert_parallel,
            # Experts that are divided among processes are whole there, so each product stays large.
            expert_tensor_parallel_size=1 if settings.expert_parallel > 1 else None,
        )
        # Dropout is 0 and weights come from files, so no CUDA random state is needed: use the no-op tracker.
        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.data_group = parallel_state.get_data_parallel_group()
        self.data_rank: int = self.data_group.rank()
        self.replica_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        """The ranks that hold the same part of the model, its experts left out."""
        self.context_group = parallel_state.get_context_parallel_group()
        self.expert_replica_group = parallel_state.get_expert_data_parallel_group()
        """The ranks that hold the same experts."""
        self.pipeline_size = settings.pipeline_parallel
        self.is_last_stage: bool = parallel_state.is_pipeline_last_stage()
        self._first_of_last_stage = self.size - self.size // settings.pipeline_parallel

    def broadcast(self, value: T) -> T:
        return self._broadcast(value, 0)

    def broadcast_from_last_stage(self, value: T) -> T:
        """Return on every rank the value of the first rank that computes the loss."""
        return self._broadcast(value, self._first_of_last_stage)

    def _broadcast(self, value: T, source: int) -> T:
        box = [value]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    def gather(self, value: T) -> list[T]:
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def device() -> torch.device:
    """Return the device of this process: its GPU, or the CPU where there is no CUDA."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _join(size: int) -> None:
    compat.apply()
    if torch.cuda.is_available():
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # lets reductions overlap with products
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        return  # the calling program joined it
    rank = int(os.environ.get("RANK", "0"))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=_store(size), rank=rank, world_size=size, timeout=TIMEOUT)


def _store(size: int) -> dist.Store | None:
    """Return where ranks find one another; None is torch's own store at MASTER_ADDR, for several nodes.

    Ranks of one node use a file that only their user can read, and sockets of the loopback interface, which
    no other machine can reach. A file on a shared file system would need locks that hold across nodes.
    """
    if size == 1:
        return dist.HashStore()
    place = os.environ.get(MEETING)
    if not place or os.environ.get("LOCAL_WORLD_SIZE") != str(size):
        return None
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(place) / "store"), size)
    store.set_timeout(TIMEOUT)
    return store
