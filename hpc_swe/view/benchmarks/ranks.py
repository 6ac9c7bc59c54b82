"""Start the ranks of a benchmark on this node, and end them together."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_swe.base.errors import NodeError
from hpc_swe.cluster.processes import MEETING, die_with_parent, kill_and_wait

POLL_S = 0.05
LAST_LINES = 20


def run_ranks(
    count: int, module: str, arguments: Sequence[str], folder: Path, timeout_s: float, *, gpu: bool
) -> None:
    """Run a module on `count` ranks of this node, whose logs lie in `folder`; without `gpu` they see no GPU.

    Raise NodeError with the last lines of a rank that failed, or of the first one when the time is over.
    """
    meeting, processes = folder / "meeting", []
    meeting.mkdir(mode=0o700)
    for rank in range(count):
        with (folder / f"{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    env=_environment(meeting, rank, count, gpu),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=die_with_parent,
                )
            )
    codes = _wait(processes, timeout_s)
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is not None or None in codes:
        why = f"not done after {timeout_s:.0f} s" if failed is None else f"exit code {codes[failed]}"
        lines = (folder / f"{failed or 0}.log").read_text(errors="replace").splitlines()[-LAST_LINES:]
        raise NodeError("\n".join([f"rank {failed or 0} of the benchmark: {why}; its last lines:", *lines]))


def _environment(meeting: Path, rank: int, count: int, gpu: bool) -> dict[str, str]:
    place = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    return {**os.environ, MEETING: str(meeting), **place, **hidden}


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """Wait until all have ended, or one has failed; return their exit codes by then, and end the others."""
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            codes = [process.poll() for process in processes]
            if any(codes) or None not in codes or time.monotonic() > deadline:
                return codes
            time.sleep(POLL_S)
    finally:
        for process in processes:
            process.kill()
        if stuck := [process.pid for process in processes if not kill_and_wait(process)]:
            raise NodeError(
                f"processes {stuck} do not end, though they were killed; they may hold GPU memory"
            )
