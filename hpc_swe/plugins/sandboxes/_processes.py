# ruff: noqa: PTH123
"""Watch, stop and kill the processes of a sandbox from its process 1.

The text is sent to the container above that of `_container`: standard library only.
"""

import contextlib
import os
import resource
import signal
import time

KILLING_S = 5.0
"""Seconds in which processes are stopped or killed one by one, before all of them are killed at once."""
STOPPED = "ZXTtD"
"""States of processes that have ended, are stopped, or wait in the kernel, for a child for example."""
PAGE = resource.getpagesize()


class Processes:
    """All processes of the sandbox but this one, which is process 1.

    Those of a session descend from its program, which adopts its orphans. Once the program has ended, what it
    left is killed like any other process. Process 1 has not reaped it then, so its number is nobody else's.
    """

    def __init__(self) -> None:
        self.program = 0
        """Number of the program of the open session; 0 when there is none."""
        self.is_paused = False
        self._ended: dict[int, int] = {}

    def fork(self) -> int:
        """Fork; end the session where its processes leave no room for another one."""
        try:
            return os.fork()
        except OSError:
            self.kill_all()
            return os.fork()

    def kill_all(self) -> None:
        """Kill and reap all processes: for process 1, pid -1 means all others of the namespace, at once."""
        self.program, self.is_paused = 0, False
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(-1, signal.SIGKILL)
            while True:
                self._reap(-1, 0)

    def end(self, command: int) -> int:
        """Kill and reap all processes but the session's, and return a command's wait status.

        Never wait for the command alone: while another process traces it, its end is hidden from its parent.
        """
        self._ended = {}
        self._reap(command)
        self._kill_others()
        return self._ended.get(command, signal.SIGKILL)

    def _reap(self, pid: int, flags: int = os.WNOHANG) -> None:
        ended, status = os.waitpid(pid, flags)
        if not os.WIFSTOPPED(status):  # its parent learns that a process stops, if it asked to be traced
            self._ended[ended] = status

    def _kill_others(self) -> None:
        """Kill and reap all processes but the session's; all of them if they multiply too fast for that."""
        deadline = time.monotonic() + KILLING_S
        while self.program and time.monotonic() < deadline:
            theirs, others = self._found()
            if not theirs:
                break
            if not others:
                return self.signal(signal.SIGSTOP if self.is_paused else 0)
            for pid in others:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    self._reap(pid)
            time.sleep(0.002)
        return self.kill_all()

    def signal(self, number: int) -> None:
        """Stop or continue the session's processes; end them if they multiply too fast to be stopped.

        A stopped process uses no time of a processor and no more memory.
        """
        if not number or not self.program:
            return
        self.is_paused = number == signal.SIGSTOP
        deadline = time.monotonic() + KILLING_S
        while time.monotonic() < deadline:
            theirs = self._found()[0]
            for pid in theirs:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number == signal.SIGCONT or set(theirs.values()) <= set(STOPPED):
                return
            time.sleep(0.002)
        self.kill_all()

    def watch(self, memory_mb: int) -> None:
        """Kill all processes if they use too much memory together, or go on although they were stopped.

        A process can ask the kernel for a signal that continues it later.
        """
        if not self.is_paused:
            kill_above(memory_mb)
        elif not set(self._found()[0].values()) <= set(STOPPED):
            self.kill_all()

    def _found(self) -> tuple[dict[int, str], dict[int, str]]:
        """Return the states of the session's processes, and of all others, by number."""
        parents, states = {}, {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if name != "1":
                states[int(name)], parents[int(name)] = fields[0].decode(), int(fields[1])
        theirs = {self.program} if states.get(self.program, "Z") not in "ZX" else set()
        while more := {pid for pid, parent in parents.items() if parent in theirs} - theirs:
            theirs |= more
        return {pid: states.pop(pid) for pid in theirs}, states


def kill_above(memory_mb: int) -> None:
    """Kill all processes but this one, a session's too, if they use too much memory together."""
    if _used_mb("statm") > memory_mb and _used_mb("smaps_rollup") > memory_mb:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)


def _used_mb(source: str) -> float:
    """Sum the memory of all processes of this namespace but this one, by their files `source` in /proc.

    smaps_rollup counts shared memory once, statm for each process. A process that hides how much it shares is
    taken to share nothing.
    """
    total = 0
    for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {"1"}:
        for name in dict.fromkeys((source, "statm")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}") as file:  # it ended meanwhile
                lines = [line.split() for line in file]
                if name == "statm":
                    total += int(lines[0][1]) * PAGE
                else:
                    total += 1024 * sum(int(line[1]) for line in lines if line[0] == "Pss:")
                break
    return total / (1 << 20)
