# ruff: noqa: BLE001, PTH116
"""Exchange messages between the debugger in a sandbox and the host, and keep what it writes.

The text is sent to the sandbox as the first part of the debugger: standard library only, for Python 3.7 and
later. A message is JSON behind its length in four bytes.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import resource
import struct
import sys
from typing import Any

MOST_CHARS = 40_000
"""Characters of a command's output that an answer holds."""
MOST_NOTE_CHARS = 4_000


class Channel:
    """Exchange messages with the host. Its files have high numbers, since programs close low ones."""

    def __init__(self, numbers: list[str]) -> None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        place = min(soft if soft > 0 else 4096, 4096) - 16
        self.files = [fcntl.fcntl(int(number), fcntl.F_DUPFD_CLOEXEC, place) for number in numbers]
        for number in numbers:
            os.close(int(number))

    def receive(self) -> dict[str, Any]:
        request: dict[str, Any] = json.loads(self._read(struct.unpack(">I", self._read(4))[0]))
        return request

    def send(self, answer: dict[str, Any]) -> None:
        text = json.dumps(answer, ensure_ascii=False).encode()
        data = struct.pack(">I", len(text)) + text
        try:
            while data:
                data = data[os.write(self.files[1], data) :]
        except OSError:
            os._exit(1)

    def close(self) -> None:
        """Close both files, once: a child's child may have files of its own with these numbers."""
        for file in self.files:
            try:
                os.close(file)
            except OSError:  # the program has closed it
                continue
        self.files = []

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                piece = os.read(self.files[0], size - len(data))
            except OSError:
                piece = b""
            if not piece:
                os._exit(1)  # the host is gone, or the program closed this file
            data += piece
        return data


class Kept(io.TextIOBase):
    """Keep the beginning and the end of what is written, MOST_CHARS in all."""

    def __init__(self) -> None:
        self.head, self.tail, self.size = "", "", 0

    def write(self, text: str) -> int:
        room = max(MOST_CHARS // 2 - len(self.head), 0)
        self.head += text[:room]
        self.tail = (self.tail + text[room:][-MOST_CHARS // 2 :])[-MOST_CHARS // 2 :]
        self.size += len(text)
        return len(text)

    def take(self) -> str:
        missing = self.size - len(self.head) - len(self.tail)
        note = f"\n[... {missing} characters cut ...]\n" if missing else ""
        text = self.head + note + self.tail
        self.head, self.tail, self.size = "", "", 0
        return text


def flush() -> None:
    """Write out what the program has printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the program may have closed or replaced it
            continue


def clean(value: Any) -> Any:
    """Return a text without halves of surrogate pairs, which no valid message has; others as they are."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def stamp(path: str) -> tuple[int, int]:
    try:
        state = os.stat(path)
    except OSError:
        return 0, 0
    return state.st_mtime_ns, state.st_size
