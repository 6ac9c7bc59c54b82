# ruff: noqa: PTH123
"""Watch, stop and kill the processes of a sandbox from its process 1.

The text is sent to the container above that of `container`: standard library only.
"""

import contextlib
import os
import resource
import signal
import time
from typing import NamedTuple

# In a container, these are in the texts above.
from hpc_swe.agents.sandboxes._inside.descriptors import InFlight
from hpc_swe.agents.sandboxes._inside.kernel import KernelMemory, locks_too_much, others

KILLING_S = 5.0
"""Seconds in which processes are stopped or killed one by one, before all of them are killed at once."""
FORKING_S = 5.0
"""Seconds in which a command waits for room for its first process."""
ENDED = set("ZX")
STOPPED = ENDED | set("TtD")
"""States of threads that have ended, are stopped, or wait in the kernel, for a child for example."""
REST_S = 0.05
"""Processor time that all processes of a session together may use while they should stand still."""
PAGE, TICKS = resource.getpagesize(), os.sysconf("SC_CLK_TCK")


class Seen(NamedTuple):
    """Hold what /proc shows of a process."""

    parent: int
    states: set[str]
    """Of all its threads: others may go on when the first one has ended."""
    cpu_s: float
    """Processor time of all threads, also of those that have ended."""


class Processes:
    """All processes of the sandbox but this one, which is process 1.

    Those of a session descend from its program, which adopts its orphans. Once the program has ended, what it
    left is killed like any other process. Process 1 has not reaped it then, so its number is nobody else's.
    """

    def __init__(self, memory_mb: int) -> None:
        self._memory_mb = memory_mb
        self._in_flight = InFlight()
        self._kernel = KernelMemory()
        self.program = 0
        """Number of the program of the open session; 0 when there is none."""
        self.is_paused = False
        self._at_rest: dict[int, Seen] = {}
        self._ended: dict[int, int] = {}

    def fork(self) -> int:
        """Fork; end the session where its processes leave no room for another one.

        Sandboxes of the same job may have left none, so this is tried for some seconds.
        """
        deadline = time.monotonic() + FORKING_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                return os.fork()
            self.kill_all()
            time.sleep(0.1)
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
            if number == signal.SIGCONT:
                return
            if all(seen.states <= STOPPED for seen in theirs.values()):
                self._at_rest = theirs
                return
            time.sleep(0.002)
        self.kill_all()

    def interrupt(self, number: int) -> None:
        """Send a signal to the program of the session, whose number is nobody else's until it is reaped."""
        if self.program:
            os.kill(self.program, number)

    def kill_greedy(self) -> None:
        """Kill all processes, a session's too, if they take too much memory, descriptors or locks."""
        left_mb = self._memory_mb - self._kernel.mb()
        takes_memory = _used_mb("statm") > left_mb and _used_mb("smaps_rollup") > left_mb
        if takes_memory or self._in_flight.are_too_many() or locks_too_much():
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)

    def watch(self) -> None:
        """Kill all processes if they take too much together, or go on although they were stopped.

        A process can ask the kernel for a signal that continues it later, or one that ends the program; and
        what the program does not adopt any more is not among those that were stopped.
        """
        self.kill_greedy()
        if self.is_paused and not self._is_at_rest():
            self.kill_all()

    def _is_at_rest(self) -> bool:
        """Return whether there is nothing but the processes that were stopped, and they have not run since.

        A process may run and stop itself between two looks, so their processor time counts too.
        """
        theirs, others = self._found()
        ran_s = sum(
            seen.cpu_s - self._at_rest[pid].cpu_s for pid, seen in theirs.items() if pid in self._at_rest
        )
        is_still = all(seen.states <= STOPPED for seen in theirs.values()) and ran_s <= REST_S
        return bool(theirs) and is_still and not others and theirs.keys() <= self._at_rest.keys()

    def _found(self) -> tuple[dict[int, Seen], dict[int, Seen]]:
        found = {}
        for name in others():
            with contextlib.suppress(OSError):  # it ended meanwhile
                found[int(name)] = seen(name)
        is_alive = self.program in found and not found[self.program].states <= ENDED
        theirs = {self.program} if is_alive else set()
        while more := {pid for pid, each in found.items() if each.parent in theirs} - theirs:
            theirs |= more
        return {pid: found.pop(pid) for pid in theirs}, found


def seen(pid: str) -> Seen:
    """Look at a process; raise OSError when it has ended meanwhile."""
    whole = _stat(f"/proc/{pid}/stat")
    states = {whole[0].decode()}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            states.add(_stat(f"/proc/{pid}/task/{thread}/stat")[0].decode())
    return Seen(int(whole[1]), states, (int(whole[11]) + int(whole[12])) / TICKS)


def _stat(path: str) -> list[bytes]:
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _used_mb(source: str) -> float:
    """Sum the memory of all processes of this namespace but this one, by their files `source` in /proc.

    smaps_rollup counts shared memory once, statm for each process. A process that hides how much it shares is
    taken to share nothing.
    """
    total = 0
    for pid in others():
        for name in dict.fromkeys((source, "statm")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}") as file:  # it ended meanwhile
                lines = [line.split() for line in file]
                if name == "statm":
                    total += int(lines[0][1]) * PAGE
                else:
                    total += 1024 * sum(int(line[1]) for line in lines if line[0] == "Pss:")
                break
    return total / (1 << 20)
