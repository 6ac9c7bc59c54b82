"""Run an engine as a child process and leave nothing behind when it ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_swe.base.errors import EngineError, NoAnswer, NodeError
from hpc_swe.base.store import atomic
from hpc_swe.cluster import scratch
from hpc_swe.cluster.processes import StoppedProcesses, descendants, leader, start_time

STOP_S = 15.0
"""Longest wait for the guard's end, which takes less."""
KILLED_S = 180.0
"""Longest wait for the end of killed processes, which free their memory of host and GPU."""
LOOK_S = 1.0
"""Seconds between two looks for stopped processes."""


class Child:
    """Run an engine under its guard, in a process group of their own."""

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        output: Path,
        locks: Sequence[int] = (),
        vital: str = "",
    ) -> None:
        """Start the command. Its guard inherits the descriptors `locks`, whose locks it holds to its end.

        Processes whose names begin with `vital` must not end before the command does.
        """
        self.output, self._vital = output, vital.encode()
        self._found: dict[int, tuple[str, str]] = {}
        """Process id -> start time and name of each process with such a name at the last look."""
        self._seen: dict[int, tuple[str, str]] = {}
        """Those found twice: a child bears its parent's name until it runs a program."""
        self._stopped, self._due = StoppedProcesses(), 0.0
        self._folder = scratch.make()  # also removes folders of engines killed together with their guard
        guard = [sys.executable, "-P", "-m", "hpc_swe.roles.inference.guard", str(self._folder), *command]
        with atomic.storage(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            log = output.open("ab")
        with log as out:
            self._guard = subprocess.Popen(
                guard,
                env=environment | {"TMPDIR": str(self._folder)},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=locks,
            )

    def require_alive(self) -> None:
        """Raise EngineError, with its log, if the engine ended; NoAnswer if one of its processes fails it."""
        if self._guard.poll() is not None:
            raise EngineError(f"the engine ended; see {self.output}")
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LOOK_S
        below = descendants(self._guard.pid)
        self._require_vital(below)
        if stopped := self._stopped.find([self._guard.pid, *below]):
            raise NoAnswer(f"process {stopped[0]} of the engine is stopped")

    def _require_vital(self, below: Sequence[int]) -> None:
        """Raise NoAnswer if a vital process ended: the server above it may answer no more."""
        for pid, (began, name) in self._seen.items():
            if start_time(pid) != began:
                raise NoAnswer(f"{name}, process {pid} of the engine, has ended")
        before, self._found = self._found, {}
        for pid in below if self._vital else ():
            with contextlib.suppress(OSError):  # it ended meanwhile
                comm = Path(f"/proc/{pid}/comm").read_bytes().strip()
                if comm.startswith(self._vital) and (start := start_time(pid)):
                    self._found[pid] = start, comm.decode(errors="replace")
        self._seen |= {pid: each for pid, each in self._found.items() if before.get(pid) == each}

    def stop(self, killed_s: float = KILLED_S) -> None:
        """End the engine, and return when none of its processes is left.

        Raise NodeError if one does not end although it was killed: it waits inside the kernel and may keep
        memory of a GPU, so no other engine must start here.
        """
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):  # in case the guard was killed itself
            os.killpg(self._guard.pid, signal.SIGKILL)
        deadline = time.monotonic() + killed_s
        while self._guard.poll() is None or _left(self._guard.pid):
            if time.monotonic() > deadline:
                left = _left(self._guard.pid) or [self._guard.pid]
                raise NodeError(
                    f"{socket.gethostname()}: killed processes do not end within {killed_s:g} s "
                    f"and may keep memory of GPUs: {', '.join(map(str, left))}; see {self.output}"
                )
            time.sleep(0.05)
        scratch.remove(self._folder)


def _left(group: int) -> list[int]:
    """Return the processes of a group that have not ended, or of which a thread has not."""
    pids = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if leader(pid) == group]
    return [pid for pid in pids if start_time(pid) or len(list(Path(f"/proc/{pid}/task").glob("*"))) > 1]
