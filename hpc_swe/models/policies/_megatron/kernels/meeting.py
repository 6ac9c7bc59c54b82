"""Join the processes of a learner into one process group.

Python objects travel over gloo, also where tensors use NCCL: a rank that waits for a batch must neither
spin on the GPU nor trigger NCCL's watchdog.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from hpc_swe.cluster import gpus
from hpc_swe.cluster.processes import MEETING

T = TypeVar("T")
TIMEOUT = timedelta(hours=1)


class JoinedRanks:
    """Connect this process with those of its job, of which each has data of its own."""

    def __init__(self) -> None:
        """Join the group that the environment describes, unless the calling program has joined it."""
        if torch.cuda.is_available():
            rank = int(os.environ.get("LOCAL_RANK", "0"))
            torch.cuda.set_device(gpus.of_rank(rank, torch.cuda.device_count(), os.environ))
        if not dist.is_initialized():
            rank, size = (int(os.environ.get(*each)) for each in (("RANK", "0"), ("WORLD_SIZE", "1")))
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=_store(size), rank=rank, world_size=size, timeout=TIMEOUT)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.data_rank: int = self.rank
        self.data_size: int = self.size

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the value of one rank on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order of ranks, on every rank."""
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


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
