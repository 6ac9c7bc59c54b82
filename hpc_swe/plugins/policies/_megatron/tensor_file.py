"""Write safetensors files from several threads while the tensors are still being collected.

The header of the format comes first and must name all tensors, so room for it is reserved, and it is written
last, padded with spaces. Values come from a GPU through one pinned buffer for each thread.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

THREADS = min(8, os.cpu_count() or 1)
BUFFER = 1 << 26
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
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
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

    def write(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.pwrite(self._file, data, offset)
            data, offset = data[count:], offset + count

    def finish(self) -> None:
        """Write the header, and make the file durable."""
        header = f"{{{','.join(self._entries)}}}".encode()
        if len(header) > self._room:
            raise ValueError(f"a header of {len(header)} bytes, with room for {self._room}")
        self.write(memoryview(self._room.to_bytes(8, "little") + header.ljust(self._room)), 0)
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


class TensorFiles:
    """Spread tensors over files, each to the shortest with room in its header, and write them in threads."""

    def __init__(self, paths: Sequence[Path], names: Sequence[str]) -> None:
        """Open the files; `names` are all that may be added."""
        entries = [len(name) + ENTRY for name in names]
        self._share = -(-sum(entries) // len(paths))
        """Bytes of a header that end a batch. Some file has as many left, and those of one tensor more."""
        room = min(sum(entries), 2 * self._share + max(entries, default=0))
        self._files: dict[Path, TensorFile] = {}
        self._pool = ThreadPoolExecutor(THREADS, "export", initializer=_device_of_caller())
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._ahead, self._local = 0, threading.local()
        self._failure: OSError | None = None
        self.where: dict[str, str] = {}
        """Tensor -> name of its file."""
        self.size = 0
        """Bytes of all tensors."""
        try:
            for path in paths:
                self._files[path] = TensorFile(path, room)
        except OSError as error:
            self._failure = error  # told by `finish`: other ranks still wait for this one's tensors

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take contiguous tensors, which must not change before `finish` has returned.

        Small ones share a write: the caller and the threads take turns in Python, which costs more than they.
        """
        if self._failure:
            return
        ready = torch.cuda.Event() if any(tensor.is_cuda for tensor in tensors.values()) else None
        if ready is not None:
            ready.record()
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
        size = sum(tensor.nbytes for tensor in batch.values())
        self.size += size
        future = self._pool.submit(self._write, path, list(batch.values()), first, ready)
        self._waiting.append((future, size))
        self._ahead += size
        while self._ahead > AHEAD:
            self._await_first()

    def finish(self) -> None:
        """Wait until all is written, and close; raise OSError if a file could not be written."""
        while self._waiting:
            self._await_first()
        try:
            if self._failure:
                raise self._failure
            list(self._pool.map(TensorFile.finish, self._files.values()))
        finally:
            self._pool.shutdown()
            for file in self._files.values():
                file.close()

    def _await_first(self) -> None:
        future, size = self._waiting.popleft()
        self._ahead -= size
        try:
            future.result()
        except OSError as error:
            self._failure = error

    def _write(
        self, path: Path, tensors: Sequence[Tensor], offset: int, ready: "torch.cuda.Event | None"
    ) -> None:
        if ready is None:
            self._write_all(path, merged(tensors), offset)
            return
        stream, buffer = self._resources(tensors[0].device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            self._write_all(path, joined(merged(tensors), buffer, stream.synchronize), offset)

    def _write_all(self, path: Path, parts: Iterable[Tensor], offset: int) -> None:
        for part in parts:
            self._files[path].write(memoryview(part.numpy()), offset)
            offset += len(part)

    def _resources(self, device: torch.device) -> tuple["torch.cuda.Stream", Tensor]:
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(device)
            self._local.buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True)
        return self._local.stream, self._local.buffer


def _device_of_caller() -> Callable[[], None] | None:
    """Return what gives a new thread the GPU of this one; None where there is no CUDA.

    The thread would have GPU 0, and leave a context of 0.5 GiB there when it leaves a stream of another GPU.
    """
    if not torch.cuda.is_available():
        return None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def merged(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes, uint8, of contiguous tensors in their order.

    Those that lie one after another in memory come in one piece, since each piece is copied by itself.
    """
    first, storage, begin, end = None, 0, 0, 0
    for tensor in tensors:
        own, start = tensor.untyped_storage().data_ptr(), tensor.storage_offset() * tensor.itemsize
        if first is not None and (own, start) != (storage, end):
            yield _bytes(first).as_strided((end - begin,), (1,))
            first = None
        if first is None:
            first, storage, begin = tensor, own, start
        end = start + tensor.nbytes
    if first is not None:
        yield _bytes(first).as_strided((end - begin,), (1,))


def joined(pieces: Iterable[Tensor], buffer: Tensor, wait: Callable[[], object]) -> Iterator[Tensor]:
    """Yield bytes, uint8, in their order, in as few parts of a buffer, uint8, as hold them.

    `wait` ends when copies into the buffer have ended. A part is valid until the next one is asked for.
    """
    filled = 0
    for piece in pieces:
        for part in piece.split(len(buffer)):
            if filled + len(part) > len(buffer):
                wait()
                yield buffer[:filled]
                filled = 0
            buffer[filled : filled + len(part)].copy_(part, non_blocking=True)
            filled += len(part)
    wait()
    yield buffer[:filled]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
