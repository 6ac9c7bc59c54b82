"""Write safetensors files from several threads while the tensors are still being collected.

The header of the format comes first and must name all tensors, so room for it is reserved, and it is written
last, padded with spaces.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hpc_swe.models.policies._megatron.weights.tensor_writer import TensorWriter, ready_event, write_all

TOGETHER = 1 << 21
"""Bytes of tensors that one write of a thread takes at least, if there are as many."""
AHEAD = 1 << 31
"""Bytes of tensors that may wait to be written; a GPU holds a copy of each until then."""
NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
}
ENTRY = 160
"""Bytes that the header needs for one tensor beside its name."""


class TensorFile:
    """Hold one file that is being written."""

    def __init__(self, path: Path, room: int) -> None:
        """Reserve so many bytes for the entries of tensors in the header."""
        self._room = (room + 7 + ENTRY) // 8 * 8
        self.room = room
        """Those that are left."""
        self._entries = ['"__metadata__":{"format":"pt"}']
        """JSON of the header, since the garbage collector would visit as many records again and again."""
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self.size = 0
        """Bytes of the tensors so far."""

    def add(self, name: str, tensor: Tensor) -> int:
        """Enter a tensor into the header, and return the offset at which its bytes must be written."""
        start, self.size = self.size, self.size + tensor.nbytes
        self.room -= len(name) + ENTRY
        self._entries.append(
            f'{json.dumps(name)}:{{"dtype":"{NAMES[tensor.dtype]}","shape":{list(tensor.shape)},'
            f'"data_offsets":[{start},{self.size}]}}'
        )
        return 8 + self._room + start

    def finish(self) -> None:
        """Write the header, and make the file durable."""
        header = f"{{{','.join(self._entries)}}}".encode()
        if len(header) > self._room:
            raise ValueError(f"a header of {len(header)} bytes, with room for {self._room}")
        write_all(self.file, memoryview(self._room.to_bytes(8, "little") + header.ljust(self._room)), 0)
        os.fsync(self.file)

    def close(self) -> None:
        os.close(self.file)


class TensorFiles:
    """Spread tensors over files, each to the shortest with room in its header, and write them in threads."""

    def __init__(self, paths: Sequence[Path], names: Sequence[str]) -> None:
        """Open the files, and make their folders; `names` are all that may be added."""
        entries = [len(name) + ENTRY for name in names]
        self._share = -(-sum(entries) // len(paths))
        """Bytes of a header that end a batch. Some file has as many left, and those of one tensor more."""
        room = min(sum(entries), 2 * self._share + max(entries, default=0))
        self._files: dict[Path, TensorFile] = {}
        self._writer = TensorWriter(AHEAD)
        self.where: dict[str, str] = {}
        """Tensor -> name of its file."""
        self.size = 0
        """Bytes of all tensors."""
        try:
            for path in paths:
                path.parent.mkdir(exist_ok=True)
                self._files[path] = TensorFile(path, room)
        except OSError as error:
            self._writer.failure = error  # raised by `finish`

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take contiguous tensors, which must not change before `finish` has returned.

        Small ones share a write: the caller and the threads take turns in Python, which costs more than they.
        """
        if self._writer.failure:
            return
        ready = ready_event(tensors.values())
        batch: dict[str, Tensor] = {}
        held = entries = 0
        for name, tensor in tensors.items():
            batch[name], held, entries = tensor, held + tensor.nbytes, entries + len(name) + ENTRY
            if held >= TOGETHER or entries >= self._share:
                self._submit(batch, entries, ready)
                batch, held, entries = {}, 0, 0
        if batch:
            self._submit(batch, entries, ready)

    def _submit(self, batch: Mapping[str, Tensor], entries: int, ready: "torch.cuda.Event | None") -> None:
        fitting = [path for path, file in self._files.items() if file.room >= entries]
        path = min(fitting, key=lambda path: self._files[path].size)
        first, *_ = [self._files[path].add(name, tensor) for name, tensor in batch.items()]
        self.where |= dict.fromkeys(batch, path.name)
        self.size += sum(tensor.nbytes for tensor in batch.values())
        self._writer.write(self._files[path].file, list(batch.values()), first, ready)

    def finish(self) -> None:
        """Wait until all is written, and close; raise OSError if a file could not be written."""
        try:
            with self._writer as writer:
                writer.finish(file.finish for file in self._files.values())
        finally:
            for file in self._files.values():
                file.close()
