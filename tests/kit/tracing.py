"""Keep a thread of another process from ending, as a device or a file system does that does not answer.

A thread that somebody traces stays, for the kernel, until the tracer looks at it, whatever killed it.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ALLOWS = "import ctypes; ctypes.CDLL(None).prctl(0x59616D61, -1)\n"
"""Python that lets any process trace the one that runs it."""
_SEIZES = "import ctypes, sys; sys.exit(ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0) or input(0))"


@contextmanager
def traced(thread: int) -> Iterator[None]:
    """Trace a thread, whose process ran `ALLOWS`, until exit."""
    command = [sys.executable, "-c", _SEIZES, str(thread)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdout.read(1) == b"0"
        try:
            yield
        finally:
            tracer.kill()
