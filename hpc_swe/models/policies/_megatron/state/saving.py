"""Repair how megatron-core 0.16.1 saves checkpoints: errors of one rank, pinned memory, copies and forks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor

from hpc_swe.models.policies._megatron.state.checkpoint_files import CheckpointFiles

_PREPARE, _WRITE = filesystem_async.FileSystemWriterAsync.prepare_write_data, "write_preloaded_data_multiproc"


@contextmanager
def collect_metadata_errors() -> Iterator[list[OSError]]:
    """Collect the errors of rank 0 in writing .metadata and metadata.json, and let the save continue.

    state_dict_saver.py:243 and serialization.py:422 raise them immediately and on rank 0 alone, while the
    other ranks wait in the next collective.
    """
    failures: list[OSError] = []

    def collecting(write: Callable[..., None]) -> Callable[..., None]:
        def attempt(*arguments: object) -> None:
            try:
                write(*arguments)
            except OSError as error:
                failures.append(error)

        return attempt

    writer = filesystem_async.FileSystemWriterAsync
    finish, save_config = writer.finish, serialization.save_config
    writer.finish, serialization.save_config = collecting(finish), collecting(save_config)
    try:
        yield failures
    finally:
        writer.finish, serialization.save_config = finish, save_config


@contextmanager
def hiding_pinned_memory() -> Iterator[None]:
    """Let no tensor say that its memory is pinned.

    sharded_tensor/api.py:1044 of torch refuses a tensor of which some shards are pinned and others are not.
    The layers' shards of one tensor are, where the host has a part of the optimizer's state.
    """
    Tensor.is_pinned = lambda _tensor, _device=None: False
    try:
        yield
    finally:
        del Tensor.is_pinned  # of the base class, which has the true one


@contextmanager
def leaving_out_values() -> Iterator[CheckpointFiles]:
    """Let Megatron write files without values, and yield what writes these.

    filesystem_async.py:266 forks writers. It would wait for ever for one that was killed, and they see no
    pinned memory. Before that, line 226 copies all tensors to the host, one after another.
    """
    writer = filesystem_async.FileSystemWriterAsync
    kept = {name: vars(writer)[name] for name in ("preload_tensors", "prepare_write_data", _WRITE)}
    with CheckpointFiles() as files:
        writer.preload_tensors = staticmethod(lambda buckets, _non_blocking: buckets)
        writer.prepare_write_data = _prepare_without_copies
        setattr(writer, _WRITE, staticmethod(files.write_files))
        try:
            yield files
        finally:
            for name, each in kept.items():
                setattr(writer, name, each)


def _prepare_without_copies(self: Any, plan: Any, planner: Any) -> None:
    """Prepare files to be written from the memory in which tensors are, of the host and of the GPU.

    filesystem_async.py:136 clones what is a part of a larger storage: torch.save would write all of that.
    """
    resolve = planner.resolve_data
    planner.resolve_data = lambda item: _with_own_storage(resolve(item))
    _PREPARE(self, plan, planner)


def _with_own_storage(data: Any) -> Any:
    """Return a tensor of the host that has the memory of another one, and no storage beyond it."""
    if not isinstance(data, Tensor) or data.device.type != "cpu" or not data.is_contiguous():
        return data
    flat = torch.from_numpy(data.detach().view(-1).view(torch.uint8).numpy())
    return flat.view(data.dtype).view(data.shape)
