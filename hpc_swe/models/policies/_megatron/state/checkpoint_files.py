"""Write the files of a checkpoint in two passes: their layout, and then the values of all tensors.

So values come from where they are, straight into their places, from several threads. torch.save alone would
first copy each tensor to the host, where it then copies it once more and computes a checksum.
"""

import contextlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import SerializationFormat

from hpc_swe.base.errors import ProtocolError
from hpc_swe.models.policies._megatron.weights.tensor_writer import BUFFER, TensorWriter, ready_event


class Unwritten(NamedTuple):
    """Locate the values of a tensor, which are not in their file yet."""

    file: int
    offset: int
    """Where they begin, in bytes."""
    tensor: Tensor
    """On the device "meta" it is a part of a buffer, whose values ranks gather."""


class CheckpointFiles:
    """Write files without the values of their tensors, and remember where these belong."""

    def __init__(self) -> None:
        self._files: list[BinaryIO] = []
        self._unwritten: list[Unwritten] = []
        self._shared: list[SharedValues] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):  # it was raised before, where it matters
                file.close()

    def write_files(
        self, _transforms: object, _use_msc: bool, _rank: int, buckets: Sequence[Any], results: Any
    ) -> None:
        """Write in place of Megatron's writers; put what they would, a result of each file or one error."""
        try:
            results.put({index: self._write_file(*bucket) for index, bucket in enumerate(buckets)})
        except Exception as error:  # noqa: BLE001 - all ranks raise it; torch's own one hides the system's
            results.put(error.__context__ if isinstance(error.__context__, OSError) else error)

    def _write_file(self, path: str, key: str, content: tuple[Any, Any]) -> list[Any]:
        file = Path(path).open("wb")  # noqa: SIM115  (open until the values are there)
        self._files.append(file)
        texts, tensors = content
        found = [self._write(_Stream(file), key, *pair) for pair in (*texts, *tensors)]
        file.flush()
        return found

    def _write(self, stream: "_Stream", key: str, item: Any, data: Any) -> Any:
        empty = torch.empty(data.shape, dtype=data.dtype) if isinstance(data, Tensor) else data
        with torch.serialization.skip_data():
            found = filesystem._write_item(
                stream, stream, empty, item, key, serialization_format=SerializationFormat.TORCH_SAVE
            )
        if isinstance(data, Tensor) and data.nbytes:
            [(offset, size)] = stream.skipped
            if size != data.nbytes or (data.is_meta and not data.is_contiguous()):
                raise ProtocolError(
                    f"{key}: torch left {size} bytes for {item.index}, not {data.nbytes} in a row"
                )
            self._unwritten.append(Unwritten(stream.fileno(), offset, data))
        return found

    def shared(self, buffer: Tensor) -> "SharedValues":
        """Return what is not written yet of a buffer on the device "meta"."""
        own = buffer.untyped_storage()._cdata
        every = (each for each in self._unwritten if each.tensor.is_meta)
        found = SharedValues([each for each in every if each.tensor.untyped_storage()._cdata == own])
        self._shared.append(found)
        return found

    def write_own(self, writer: TensorWriter) -> None:
        """Write the values that this rank has, the largest tensors first."""
        own = [each for each in self._unwritten if not each.tensor.is_meta]
        parts = [(each, each.tensor.detach().reshape(-1).view(torch.uint8)) for each in own]
        ready = ready_event(values for _, values in parts)
        for each, values in sorted(parts, key=lambda part: -len(part[1])):
            for first in range(0, len(values), BUFFER):
                piece = values[first : first + BUFFER]
                writer.write(each.file, [piece], each.offset + first, ready if piece.is_cuda else None)

    def finish(self, writer: TensorWriter) -> None:
        """Wait until all values are written and durable; raise OSError if a file could not be written.

        Raise ProtocolError if shared values are missing, for which zeros would stand in the files.
        """
        wanted = sum(each.tensor.nbytes for each in self._unwritten if each.tensor.is_meta)
        if (found := sum(each.written for each in self._shared)) != wanted:
            raise ProtocolError(f"ranks gathered {found} bytes of {wanted} for this rank's files")
        writer.finish(partial(os.fsync, file.fileno()) for file in self._files)


class SharedValues:
    """Find the places of the values of a buffer."""

    def __init__(self, unwritten: Sequence[Unwritten]) -> None:
        self._parts = sorted(unwritten, key=lambda each: each.tensor.storage_offset())
        self._starts = [each.tensor.storage_offset() for each in self._parts]
        self.written = 0
        """Bytes so far."""

    def write(self, first: int, values: Tensor, writer: TensorWriter) -> None:
        """Write values that begin at the index `first` of the buffer; between tensors there is padding.

        They may change when this has returned.
        """
        begin, end = max(0, bisect_right(self._starts, first) - 1), first + len(values)
        found = []
        for part, start in zip(self._parts[begin:], self._starts[begin:], strict=True):
            if start >= end:
                break
            low, high = max(first, start), min(end, start + part.tensor.numel())
            if low < high:
                offset = part.offset + (low - start) * values.itemsize
                found.append((part.file, offset, values[low - first : high - first].clone()))
        ready = ready_event(own for _, _, own in found)
        for file, offset, own in found:
            self.written += own.nbytes
            writer.write(file, [own], offset, ready)


class _Stream:
    """Stand for a file that one item is written into, and for how Megatron transforms it."""

    def __init__(self, file: BinaryIO) -> None:
        self.skipped: list[tuple[int, int]] = []
        """Where torch has left room for values, and how many bytes."""
        self._file = file
        self.write, self.tell, self.flush, self.fileno = file.write, file.tell, file.flush, file.fileno

    def seek(self, count: int, whence: int) -> int:
        self.skipped.append((self._file.tell(), count))
        return self._file.seek(count, whence)

    def close(self) -> None:
        """Leave the file open for the next item."""

    def transform_save_stream(self, _item: object, _stream: object) -> tuple[Self, list[str]]:
        return self, []
