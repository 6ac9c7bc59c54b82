"""Exchange messages with a program in a sandbox through two pipes, as `ProgramSession` describes.

Whatever runs in the sandbox can write to the program's end of the pipes. So every wait has a deadline, an
answer has a largest size, and nothing that is received is taken to prove anything.
"""

import os
import select
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import BinaryIO

from hpc_swe.agents.sandboxes.base import SessionEnded

OUTPUT_BYTES = 64_000  # of a command's or a program's output are kept
MOST_ANSWER_BYTES = 1 << 20
"""An honest answer is much shorter; a longer one ends the session."""


def output_file() -> BinaryIO:
    """Open a file for what a helper prints, in memory: a full TMPDIR must not hide why the helper failed."""
    return os.fdopen(os.memfd_create("output"), "w+b")


def collected(file: int, most: int, most_mb: int = 0) -> str:
    """Return the text of an open file; when it has more than `most` bytes, the middle is cut out.

    A note ends the text of a file that could not grow beyond `most_mb`.
    """
    size = os.fstat(file).st_size
    if most_mb and size >= most_mb << 20:
        return (
            f"{collected(file, most)}\n[the output ends here, at file_mb = {most_mb} of the sandbox's limits]"
        )
    if size <= most:
        return os.pread(file, most, 0).decode(errors="replace")
    head, tail = os.pread(file, most // 2, 0), os.pread(file, most // 2, size - most // 2)
    note = f"\n[... {size - 2 * (most // 2)} bytes cut ...]\n"
    return head.decode(errors="replace") + note + tail.decode(errors="replace")


@dataclass(frozen=True)
class Pipes:
    """Hold the four ends of the two pipes: the host keeps the first two and passes on the others."""

    to_program: int
    from_program: int
    program_reads: int
    program_writes: int


@contextmanager
def pipes() -> Iterator[Pipes]:
    """Open both pipes, and close the host's ends at exit; `passed_on` closes the others."""
    reads, to_program = os.pipe()
    from_program, writes = os.pipe()
    for end in (to_program, from_program):
        os.set_blocking(end, False)
    made = Pipes(to_program, from_program, reads, writes)
    try:
        yield made
    finally:
        for end in (to_program, from_program):
            os.close(end)


@contextmanager
def passed_on(made: Pipes) -> Iterator[tuple[int, int]]:
    """Return the program's ends, and close them at exit, so that the program has the only copies."""
    try:
        yield made.program_reads, made.program_writes
    finally:
        os.close(made.program_reads)
        os.close(made.program_writes)


@dataclass
class PipedProgram:
    """Send messages to one program and receive its answers, as `ProgramSession` describes."""

    pipes: Pipes
    """Both pipes; this class uses the host's ends."""
    output: int
    """Open file of the program's standard output and error, opened for appending."""
    output_bytes: int
    """Bytes of output that `printed` returns."""
    interrupt: Callable[[], None]
    """Sends INTERRUPT to the program."""
    running: Callable[[], AbstractContextManager[None]] = nullcontext
    """Lets the program's processes run until exit, and says why when the program ended."""
    _received: bytearray = field(default_factory=bytearray, init=False)

    def ask(self, message: bytes, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        with self.running():
            self._send(struct.pack(">I", len(message)) + message, deadline)
            return self._receive(deadline)

    def wait(self, timeout_s: float) -> bytes:
        with self.running():
            return self._receive(time.monotonic() + timeout_s)

    def printed(self) -> str:
        text = collected(self.output, self.output_bytes)
        os.ftruncate(self.output, 0)  # it is open for appending, so what is written next begins at 0
        return text

    def _send(self, message: bytes, deadline: float) -> None:
        data = memoryview(message)
        while data:
            if not _is_ready(self.pipes.to_program, select.POLLOUT, deadline):
                raise SessionEnded("the program does not read the debugger's commands")
            try:
                data = data[os.write(self.pipes.to_program, data) :]
            except BlockingIOError:
                continue
            except OSError:
                raise SessionEnded("the program has ended") from None

    def _receive(self, deadline: float) -> bytes:
        """Return one whole answer; what has arrived of it stays received after a TimeoutError."""
        is_late = False
        while len(self._received) < (end := 4 + self._size):
            if is_late:  # even if there is more to read: a program may write byte by byte
                raise TimeoutError("the program has not answered in time")
            is_late = time.monotonic() >= deadline
            if _is_ready(self.pipes.from_program, select.POLLIN, deadline):
                self._read()
        answer = bytes(self._received[4:end])
        del self._received[:end]
        return answer

    def _read(self) -> None:
        with suppress(BlockingIOError):
            piece = os.read(self.pipes.from_program, 1 << 16)
            if not piece:
                raise SessionEnded("the program has ended")
            self._received += piece
            if len(self._received) >= 4 and self._size > MOST_ANSWER_BYTES:
                raise SessionEnded("the program wrote to the debugger's pipe")

    @property
    def _size(self) -> int:
        return int.from_bytes(self._received[:4], "big")


def _is_ready(file: int, event: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(file, event)
    return bool(poll.poll(1000 * max(deadline - time.monotonic(), 0.0)))
