"""Run an engine that must not outlive its supervisor: python -m ...guard FOLDER COMMAND...

Standard input is a pipe whose other end only the supervisor holds. Its end of file means that the
supervisor ends the engine, or has died in whatever way. The guard leads a process group of its own, kills
all that is left in it, and removes FOLDER, the engine's temporary files.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_swe.cluster import scratch
from hpc_swe.cluster.processes import die_with_parent

GRACE_S = 8.0
TRACKERS_S = 5.0
NOTE_S = 5.0  # between two listings of the engine's shared memory


def main(folder: str, command: Sequence[str]) -> None:
    """Run the engine until it ends or standard input does, then clean up."""
    scratch.own(Path(folder))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    due = 0.0
    while child.poll() is None and not select.select([sys.stdin], [], [], 0.25)[0]:
        if time.monotonic() >= due:
            due = time.monotonic() + NOTE_S
            scratch.note_memory(Path(folder), _others())
    print(
        "guard: engine", "asked to end" if child.poll() is None else f"ended with {child.poll()}", flush=True
    )
    child.terminate()
    _await_end(child, GRACE_S)
    for pid, command_line in _others().items():
        # Python's resource trackers unlink semaphores once all processes that used them have ended.
        if b"resource_tracker" not in command_line:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    _await_end(child, TRACKERS_S)
    scratch.remove(Path(folder))
    os.killpg(0, signal.SIGKILL)


def _await_end(child: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (child.poll() is None or _others()) and time.monotonic() < deadline:
        time.sleep(0.05)


def _others() -> dict[int, bytes]:
    """Map the pid of each other live process of the group to its command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The name in it may be any bytes: anybody on this node chooses that of his processes.
            state, _, group = (path / "stat").read_bytes().rpartition(b")")[2].split()[:3]
            if int(group) == os.getpgrp() and int(path.name) != os.getpid() and state != b"Z":
                found[int(path.name)] = (path / "cmdline").read_bytes()
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
