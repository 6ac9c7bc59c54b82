"""Let a process of a job write the stacks of its threads when its watchdog asks, and collect them.

The signal handler is faulthandler's, which is written in C: it needs neither Python's lock nor the main
thread, so a process that hangs inside a library answers too. The stacks go into the job's meeting folder,
where only this user can write, and no sandbox sees it. A process inside a sandbox cannot signal this one.
"""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_swe.cluster.processes import MEETING, descendants

SIGNAL = signal.SIGUSR1
STACKS = "stack-"
ANSWER_S = 3.0
MOST = 1 << 16
"""Most bytes of one process's stacks; the main thread comes last and is kept."""
MOST_LISTED = 50


def register() -> None:
    """Answer the watchdog's signal from now on, if this process has a watchdog."""
    folder, rank = os.environ.get(MEETING), os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if folder:
        file = (Path(folder) / f"{STACKS}{rank}-{os.getpid()}").open("wb", buffering=0)
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def collect(children: Sequence[int], folder: Path) -> str:
    """Ask children for their stacks; return these, and the states of all processes below the children.

    A child that does not answer, such as one that is stopped or waits inside the kernel, is waited for
    `ANSWER_S`; the list says in which function of the kernel it waits, where the kernel tells.
    """
    asked = [pid for pid in children if _answers(pid)]
    for pid in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
    _await(folder, len(asked))
    listed = [each for pid in children for each in (pid, *descendants(pid))]
    lines = ["state, kernel function, and the name that each process of the job gives itself:"]
    lines += [f"  {pid} {state(pid)}" for pid in listed[:MOST_LISTED]]
    for path in sorted(folder.glob(f"{STACKS}*")):
        text = path.read_bytes()[-MOST:].decode("ascii", "replace")
        lines += [f"\nstacks of process {path.name.removeprefix(STACKS)} (rank-pid):", text or "no answer"]
    return "\n".join(lines) + "\n"


def _answers(pid: int) -> bool:
    """Return whether the process handles the signal, which would end another one without a word.

    A process that blocks it waits for it in a thread, as srun does, which forwards it to all ranks.
    """
    masks = [line.split() for line in _read(pid, "status").splitlines()]
    handled = [int(words[1], 16) for words in masks if words[0] in ("SigCgt:", "SigBlk:")]
    return any(mask >> (SIGNAL - 1) & 1 for mask in handled)


def _await(folder: Path, count: int) -> None:
    """Wait until so many processes have answered, and no answer grows."""
    deadline, before = time.monotonic() + ANSWER_S, [-1]
    while time.monotonic() < deadline:
        sizes = [size for path in folder.glob(f"{STACKS}*") if (size := path.stat().st_size)]
        if len(sizes) >= count and sizes == before:
            return
        before = sizes
        time.sleep(0.3)


def state(pid: int) -> str:
    """Return a process's state, the function of the kernel in which it waits, and its name."""
    states = [line.split()[1] for line in _read(pid, "status").splitlines() if line.startswith("State:")]
    return f"{''.join(states) or 'ended'} {_read(pid, 'wchan') or '-'} {_read(pid, 'comm').strip()!a}"


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
