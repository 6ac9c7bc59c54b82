"""What a command wrote, cut in the middle when it is long."""

import os


def collected(file: int, most: int) -> str:
    """Text of an open file, at most about `most` bytes of it."""
    size = os.fstat(file).st_size
    if size <= most:
        return os.pread(file, most, 0).decode(errors="replace")
    head, tail = os.pread(file, most // 2, 0), os.pread(file, most // 2, size - most // 2)
    note = f"\n[... {size - 2 * (most // 2)} bytes cut ...]\n"
    return head.decode(errors="replace") + note + tail.decode(errors="replace")
