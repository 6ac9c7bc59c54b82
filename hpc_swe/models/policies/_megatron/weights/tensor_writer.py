"""Write the values of tensors into files from several threads.

Values come from a GPU through one pinned buffer for each thread. Those of the host are written from where
they are.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Self

import torch
from torch import Tensor

from hpc_swe.models.policies.base import WRITERS

THREADS = min(WRITERS, os.cpu_count() or 1)
BUFFER = 1 << 26


class TensorWriter:
    """Write into files that the caller has opened; keep the first failure until the end.

    When its block ends, no thread writes any more, so that the files can be closed.
    """

    def __init__(self, ahead: int) -> None:
        """Let tensors of about `ahead` bytes wait to be written; they keep their memory until then."""
        self._pool = ThreadPoolExecutor(THREADS, "writer", initializer=_device_of_caller())
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._limit, self._ahead, self._local = ahead, 0, threading.local()
        self.failure: OSError | None = None
        """Why nothing more is written; `finish` raises it, since other ranks may still wait for this one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def write(
        self, file: int, tensors: Sequence[Tensor], offset: int, ready: "torch.cuda.Event | None" = None
    ) -> None:
        """Write contiguous tensors one after another from a byte of a file on.

        They must not change before `finish` has returned; those of a GPU have their values when `ready` is
        reached.
        """
        if self.failure:
            return
        size = sum(tensor.nbytes for tensor in tensors)
        self._waiting.append((self._pool.submit(self._write, file, tensors, offset, ready), size))
        self._ahead += size
        while self._ahead > self._limit:
            self._await_first()

    def finish(self, ends: Iterable[Callable[[], object]]) -> None:
        """Wait until all is written, and call what ends each file; raise OSError if something failed."""
        while self._waiting:
            self._await_first()
        if self.failure:
            raise self.failure
        list(self._pool.map(lambda end: end(), ends))

    def _await_first(self) -> None:
        future, size = self._waiting.popleft()
        self._ahead -= size
        try:
            future.result()
        except OSError as error:
            self.failure = self.failure or error

    def _write(
        self, file: int, tensors: Sequence[Tensor], offset: int, ready: "torch.cuda.Event | None"
    ) -> None:
        if ready is None:
            _write_parts(file, merged(tensors), offset)
            return
        stream, buffer = self._resources(tensors[0].device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            _write_parts(file, joined(merged(tensors), buffer, stream.synchronize), offset)

    def _resources(self, device: torch.device) -> tuple["torch.cuda.Stream", Tensor]:
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(device)
            self._local.buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True)
        return self._local.stream, self._local.buffer


def ready_event(tensors: Iterable[Tensor]) -> "torch.cuda.Event | None":
    """Return when the values of tensors are computed, if one of them is on a GPU."""
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write bytes from an offset on, however many the system takes at a time."""
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _write_parts(file: int, parts: Iterable[Tensor], offset: int) -> None:
    for part in parts:
        write_all(file, memoryview(part.numpy()), offset)
        offset += len(part)


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
