"""Read rows of a tensor of a checkpoint into their place.

torch's own reader loads the whole tensor beside its place, however few rows of it are wanted. An embedding is
often larger than all else that a rank loads at a time.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.models.policies.base import WRITERS

LARGE = 2**22
"""Bytes of a saved tensor at least; finding where the rows of one lie takes a millisecond."""


class RowReader(CachedMetadataFileSystemReader):  # type: ignore[misc]
    """Read a checkpoint as its base class does, but rows of large tensors without the other rows."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with ThreadPoolExecutor(WRITERS) as pool:
            is_read = list(pool.map(lambda item: self._read_rows(item, planner), plan.items))
        left = [item for item, done in zip(plan.items, is_read, strict=True) if not done]
        done: Future[None] = super().read_data(replace(plan, items=left), planner)
        return done

    def _read_rows(self, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read an item into its place; return False, and read nothing, if it is not made of whole rows."""
        info = self.storage_data[item.storage_index]
        if item.type == LoadItemType.BYTE_IO or info.length < LARGE or info.transform_descriptors:
            return False
        place, path = planner.resolve_tensor(item).detach(), Path(self.path) / info.relative_path
        with path.open("rb") as file:
            with FakeTensorMode():  # reads where the values lie, and not the values
                saved = torch.load(self._slice_file(file, info), map_location="cpu", weights_only=True)
            is_row_wise = item.lengths[1:] == saved.shape[1:] and saved.dtype == place.dtype
            if not (is_row_wise and saved.is_contiguous() and place.is_contiguous()):
                return False
            first = saved.storage_offset() + item.storage_offsets[0] * prod(saved.shape[1:])
            begin = info.offset + saved.untyped_storage()._checkpoint_offset
            file.seek(begin + first * saved.itemsize)
            if file.readinto(place.view(-1).view(torch.uint8).numpy()) != place.nbytes:
                raise CorruptRecord(f"{path}: ends within a tensor")
        planner.commit_tensor(item, place)
        return True
