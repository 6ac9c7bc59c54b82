"""Debug programs of numpy in many sandboxes at once, with a thread for each core and with one thread.

    python -m tests.bench.threads
    python -m tests.bench.threads --episodes 64 --lanes 64 --kind process

Each episode opens a sandbox, stops in a program that multiplies and decomposes matrices, lets it go on three
times, looks at a value, and runs the whole program once more. numpy is that of this environment, which is
mounted where the sandbox has an image. `processor s` is what the stopped program has used, all of its threads
together.
"""

import argparse
import ast
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy

from hpc_swe.agents.sandboxes.base import Sandboxes
from hpc_swe.base import tables
from hpc_swe.base.loader import load
from hpc_swe.base.records import Task
from tests.kit.checkout import IMAGES
from tests.kit.debugging import session, task

PACKAGES = "/opt/packages"
PROGRAM = f"""import os
import sys
import time

sys.path.append({PACKAGES!r})
import numpy


def step(size):
    square = numpy.ones((size, size)) + numpy.eye(size)
    return float(numpy.linalg.svd(square @ square)[1].sum())


total = 0.0
for number in range(4):
    total += step(200)
    shown = (len(os.listdir("/proc/self/task")), round(time.process_time(), 3))
print(total)
"""
CALLS = ("b math_of.py:17", "c", "c", "c")


def made(kind: str, threads: int) -> Sandboxes:
    table: dict[str, object] = {"type": kind, "threads": threads}
    if kind == "apptainer":
        mount = f"{Path(numpy.__file__).parents[1]}:{PACKAGES}"
        limits = {"threads": threads, "processes": 512}
        table = {"type": kind, "images": str(IMAGES), "mounts": [mount], "limits": limits}
    sandboxes: Sandboxes = load("sandboxes", table)
    return sandboxes


def episode(sandboxes: Sandboxes, of: Task) -> tuple[int, float]:
    """Return how many threads the program had, and the processor seconds that it had used."""
    with session(sandboxes, of, timeout_s=600.0) as debug:
        debug.start("math_of.py")
        for command in CALLS:
            debug(command)
        threads, used_s = ast.literal_eval(debug("p shown").splitlines()[0].removeprefix("> "))
        done = debug.sandbox.run("python3 math_of.py", 600.0)
        assert done.exit_code == 0, done.output
    return threads, used_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=48)
    parser.add_argument("--lanes", type=int, default=16, help="episodes at a time")
    parser.add_argument("--kind", default="apptainer", choices=["apptainer", "process"])
    words = parser.parse_args()
    of = task(math_of=PROGRAM)
    columns = ["threads", "episodes/s", "processor s", "threads seen"]
    title = f"{words.episodes} episodes, {words.lanes} at a time, on {os.cpu_count()} cores"
    table = tables.table(["kind"], columns, title=title)
    for threads in (0, 1):
        sandboxes = made(words.kind, threads)
        episode(sandboxes, of)  # starts the container
        began = time.perf_counter()
        with ThreadPoolExecutor(words.lanes) as pool:
            found = list(pool.map(lambda _, kind=sandboxes: episode(kind, of), range(words.episodes)))
        rate = words.episodes / (time.perf_counter() - began)
        used_s = sum(each[1] for each in found) / len(found)
        most = max(each[0] for each in found)
        table.add_row(
            words.kind, "one for each core" if not threads else "1", f"{rate:.2f}", f"{used_s:.2f}", str(most)
        )
    tables.show(tables.screen(), table)


if __name__ == "__main__":
    main()
