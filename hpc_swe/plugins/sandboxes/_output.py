"""Read the output of commands, which may be long."""

import os


def collected(file: int, most: int) -> str:
    """Return the text of an open file; when it has more than `most` bytes, the middle is cut out."""
    size = os.fstat(file).st_size
    if size <= most:
        return os.pread(file, most, 0).decode(errors="replace")
    head, tail = os.pread(file, most // 2, 0), os.pread(file, most // 2, size - most // 2)
    note = f"\n[... {size - 2 * (most // 2)} bytes cut ...]\n"
    return head.decode(errors="replace") + note + tail.decode(errors="replace")
