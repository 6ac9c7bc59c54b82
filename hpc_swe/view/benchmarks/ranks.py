"""Start the processes of one column of a benchmark on this node, and end them together.

Each column has processes of its own, so that none inherits the memory, the compiled code or the process group
of the column before, and one that runs out of memory costs no other its figures.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_swe.base.errors import NodeError
from hpc_swe.cluster.processes import MEETING, die_with_parent, kill_and_wait

POLL_S = 0.05
OUT_OF_MEMORY = "out of memory"
LONGEST = 300


def run_ranks(
    count: int,
    module: str,
    arguments: Sequence[str],
    timeout_s: float,
    *,
    gpu: bool,
    keep: Path | None = None,
) -> str:
    """Run a module on `count` ranks of this node; return why they failed, and nothing where they did not.

    Without `gpu` they see no GPU. What the first one wrote is copied to `keep`.
    """
    with tempfile.TemporaryDirectory(prefix="hpc_swe-benchmark-") as name:
        folder, processes = Path(name), []
        (folder / "meeting").mkdir(mode=0o700)
        for rank in range(count):
            with (folder / f"{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, *arguments],
                        env=_environment(folder / "meeting", rank, count, gpu),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        preexec_fn=die_with_parent,
                    )
                )
        late = _wait(processes, timeout_s)
        logs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(count)]
        if keep is not None:
            keep.write_text(logs[0])
    if late:
        return f"not done after {timeout_s:.0f} s; its last line is: {last_line(logs)}"
    failed = [log for process, log in zip(processes, logs, strict=True) if process.returncode]
    return reason(failed) if failed else ""


def reason(logs: Sequence[str]) -> str:
    """Return why ranks failed, from what they wrote: the exception's line of the first that has one.

    torch puts the name of the rank before each line of a traceback.
    """
    if any(re.search(r"OutOfMemoryError|CUDA out of memory", log) for log in logs):
        return OUT_OF_MEMORY
    lines = [
        found[1]
        for log in logs
        for line in log.splitlines()
        if (found := re.match(r"(?:\[rank\d+\]: ?)?([\w.]+(?:Error|Exception|OutOfResources)\b.*)", line))
    ]
    return lines[0][:LONGEST] if lines else last_line(logs)


def last_line(logs: Sequence[str]) -> str:
    """Return the last line of the first process that wrote something."""
    found = [log.strip().splitlines()[-1] for log in logs if log.strip()]
    return found[0][:LONGEST] if found else "it wrote nothing"


def _environment(meeting: Path, rank: int, count: int, gpu: bool) -> dict[str, str]:
    place = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    return {**os.environ, MEETING: str(meeting), **place, **hidden}


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Wait until all are done, or one has failed; end the others, and return whether the time ran out."""
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            if any(codes) or all(code == 0 for code in codes):
                return False
            time.sleep(POLL_S)
        return True
    finally:
        for process in processes:
            process.kill()
        if stuck := [process.pid for process in processes if not kill_and_wait(process)]:
            raise NodeError(
                f"processes {stuck} do not end, though they were killed; they may hold GPU memory"
            )
