"""Seconds from a SIGSTOP that nobody takes back until the run goes on.

    python -m tests.bench.freeze [--times N] [--model FOLDER] [--kinds KIND ...]

The configuration is configs/demo.toml with its own limits, and real engine and learner processes. For each
kind of process one is frozen, N times. The table has, as median and longest, the seconds until the frozen
process was ended, until another one of its kind lived, and until the run published its next version, beside
the seconds that a version took before.
"""

import argparse
import ctypes
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpc_swe.rundir import RunDir
from tests.bench.chaos import (
    LOOK_S,
    PR_SET_CHILD_SUBREAPER,
    STILL_S,
    Chaos,
    of,
    say,
    scratch,
    send,
    supply,
)
from tests.kit.books import Books
from tests.kit.run_processes import Process, family

KINDS = ("EngineCore", "API server", "inference supervisor", "learner rank")
REST_VERSIONS = 2
"""Versions between two freezes, so that none hits a run that still recovers."""


def freeze(chaos: Chaos, kind: str) -> tuple[float, float, float]:
    """Freeze one process; seconds until it was ended, replaced, and until the next version."""
    victim = of(kind, family())[0]
    began, versions = time.monotonic(), len(chaos.progress)
    send(victim, signal.SIGSTOP)
    say(f"froze {kind} {victim.pid}")
    ended = _seconds(chaos, began, lambda: not victim.is_alive)
    replaced = _seconds(chaos, began, lambda: any(_is_another(p, victim) for p in of(kind, family())))
    return ended, replaced, _seconds(chaos, began, lambda: len(chaos.progress) > versions)


def _is_another(process: Process, victim: Process) -> bool:
    return process.started != victim.started


def _seconds(chaos: Chaos, began: float, is_there: Callable[[], bool]) -> float:
    while not is_there():
        chaos.look()
        time.sleep(LOOK_S)
        if time.monotonic() - began > STILL_S:
            return float("inf")
    return time.monotonic() - began


def rest(chaos: Chaos) -> float:
    """Let some versions pass; the median seconds of one."""
    seen = len(chaos.progress)
    assert _seconds(chaos, time.monotonic(), lambda: len(chaos.progress) > seen + REST_VERSIONS) < STILL_S
    last = chaos.progress[-REST_VERSIONS - 1 :]
    return statistics.median(after - before for before, after in zip(last, last[1:], strict=False))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.freeze", description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--model", type=Path, help="one that calls the tools; else it is made, in minutes")
    arguments = parser.parse_args()
    os.umask(0o077)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="freeze-") as name:
        folder = Path(name)
        os.environ |= {"TMPDIR": f"{folder}/tmp", "OMP_NUM_THREADS": "1"}
        scratch().mkdir()
        supply(folder / "model", arguments.model)
        run = RunDir(folder / "run")
        chaos = Chaos(run, Books(run, folder / "batches"), random.Random(0), [])
        chaos.launch("start", *chaos.configuration(100_000)).wait()
        rows, version_s = [], [rest(chaos)]
        for kind in arguments.kinds:
            found = []
            for _ in range(arguments.times):
                found.append(freeze(chaos, kind))
                version_s.append(rest(chaos))
            cells = [f"{statistics.median(part):.0f} ({max(part):.0f})" for part in zip(*found, strict=True)]
            rows.append(f"| {kind} | {len(found)} | {' | '.join(cells)} |")
        left = chaos.leftovers()
    print("| frozen | times | ended after s | replaced | next version |\n|---|---|---|---|---|")
    print("\n".join(rows))
    print(f"a version in between took {statistics.median(version_s):.0f} s; left: {left or 'nothing'}")
    return 1 if left or "inf" in "".join(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
