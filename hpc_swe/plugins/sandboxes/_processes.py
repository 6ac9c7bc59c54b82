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
PAGE = resource.getpagesize()


def kill_above(memory_mb: int) -> None:
    """Kill all processes, those of a session too, if they use too much memory together."""
    if used_mb("statm") > memory_mb and used_mb("smaps_rollup") > memory_mb:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)


def used_mb(source: str) -> float:
    """Sum the memory of all processes of this namespace but this one, by their files `source` in /proc.

    smaps_rollup counts shared memory once, statm for each process. A process that hides how much it shares is
    taken to share nothing.
    """
    total = 0
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or pid == "1":
            continue
        for name in dict.fromkeys((source, "statm")):
            try:
                with open(f"/proc/{pid}/{name}") as file:
                    text = file.read()
            except OSError:
                continue  # it ended meanwhile
            if name == "statm":
                total += int(text.split()[1]) * PAGE
            else:
                total += 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line[:4] == "Pss:")
            break
    return total / (1 << 20)


def kill_all() -> None:
    """Kill and reap all other processes: for process 1, pid -1 means all others of the namespace, at once."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def processes(program: int) -> tuple[dict[int, str], dict[int, str]]:
    """Return the states of a session's processes, and those of all others but this one, by number.

    The program is the parent of its orphans, so all its processes descend from it until it ends. Once it has
    ended, there are none, and whatever it left is among the others.
    """
    parents, states = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if name != "1":
            states[int(name)], parents[int(name)] = fields[0].decode(), int(fields[1])
    theirs = {program} if states.get(program, "Z") not in "ZX" else set()
    while more := {pid for pid, parent in parents.items() if parent in theirs} - theirs:
        theirs |= more
    found = {pid: states.pop(pid) for pid in theirs}
    return found, states


def kill_others(program: int) -> None:
    """Kill and reap all processes but those of a session; all of them if they multiply too fast for that."""
    deadline = time.monotonic() + KILLING_S
    while program and time.monotonic() < deadline:
        theirs, others = processes(program)
        if not theirs:
            break
        for pid in others:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        if not others:
            return
        time.sleep(0.002)
    kill_all()


def signal_tree(program: int, number: int) -> None:
    """Stop or continue all processes of a session; end them if they multiply too fast to be stopped.

    A stopped process uses no time of a processor and no more memory. One in state D waits in the kernel.
    """
    done = "ZXTtD" if number == signal.SIGSTOP else "ZX"
    deadline = time.monotonic() + KILLING_S
    while time.monotonic() < deadline:
        running = [pid for pid, state in processes(program)[0].items() if state not in done]
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if not running or number == signal.SIGCONT:
            return
        time.sleep(0.002)
    kill_all()
