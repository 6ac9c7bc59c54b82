"""What a sandbox costs, ours beside mini-swe-agent's: python -m tests.bench.sandbox_bench IMAGE.sif.

mini-swe-agent is no part of hpc_swe. Put it where only this program sees it:

    pip install --no-deps --target /tmp/mini mini-swe-agent==2.4.6 platformdirs python-dotenv
    PYTHONPATH=/tmp/mini python -m tests.bench.sandbox_bench .cache/images/python-pytest.sif

Run it as an ordinary user: mini-swe-agent's `--fakeroot` does not serve root. One run measures all columns,
one after the other, so that other work on the machine shows in all of them.
"""

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.base.records import Task, TestPlan
from hpc_swe.cluster.processes import descendants

COLD, TOGETHER = 5, 8
LOOK = "git status --short"


def timed(act: Callable[[], object], times: int) -> list[float]:
    """Milliseconds of each time."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        act()
        found.append(1e3 * (time.perf_counter() - begun))
    return found


def spread(found: list[float]) -> str:
    middle, last = statistics.median(found), sorted(found)[int(0.95 * len(found))]
    return f"{middle:.1f} ({last:.1f})"


def memory_mb() -> float:
    """Proportional share of all our children."""
    total = 0
    for child in descendants(os.getpid()):
        lines = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def disk_mb(folder: Path) -> float:
    done = subprocess.run(["du", "-sk", folder], stdout=subprocess.PIPE, text=True)
    return int(done.stdout.split()[0]) / 1024


def ours(sif: Path, workdir: str, starts: int, commands: int, local: str) -> dict[str, str]:
    plan = TestPlan(command="", fail_to_pass=[], timeout_s=60.0)
    task = Task(
        task_id="b", taskset="bench", prompt="", image=sif.stem, workdir=workdir, files={}, tests=plan
    )
    rows: dict[str, str] = {}
    before = memory_mb()
    with tempfile.TemporaryDirectory() as images:
        Path(images, sif.name).symlink_to(sif.resolve())
        cold = Apptainer(images=images, local=local, shared_container=False)
        warm = Apptainer(images=images, local=local)

        def start(sandboxes: Apptainer) -> None:
            with sandboxes.open(task):
                pass

        if local:
            rows["unpacked once per node, ms"] = f"{timed(lambda: start(cold), 1)[0]:.0f}"
            rows["disk, once per node, MB"] = f"{disk_mb(Path(local)):.0f}"
        rows["first start of an image, ms"] = spread(timed(lambda: start(cold), COLD))
        with warm.open(task) as sandbox:
            rows["first git status, ms"] = spread(timed(lambda: sandbox.run(LOOK, 60), 1))
            rows["second git status, ms"] = spread(timed(lambda: sandbox.run(LOOK, 60), 1))
        rows["start, ms"] = spread(timed(lambda: start(warm), starts))
        with ExitStack() as stack:
            stack.enter_context(warm.open(task))
            empty = memory_mb()
            for _ in range(TOGETHER):
                sandbox = stack.enter_context(warm.open(task))
                sandbox.run(LOOK, 60)
            rows["memory of a container, MB"] = f"{empty - before:.0f}"
            rows["memory of a sandbox, MB"] = f"{(memory_mb() - empty) / TOGETHER:.1f}"
            rows["`true`, ms"] = spread(timed(lambda: sandbox.run("true", 60), commands))
            used = sandbox.run("df --output=used -k / | tail -1", 60).output
            rows["written by git status, MB"] = f"{int(used) / 1024:.1f} of memory"
    return rows


def mini(sif: Path, workdir: str, starts: int, commands: int) -> dict[str, str]:
    try:
        environment = importlib.import_module("minisweagent.environments.singularity").SingularityEnvironment
    except ImportError as error:
        print(f"mini-swe-agent is left out ({error}):\n{__doc__}", file=sys.stderr)
        return {}
    words = {"image": str(sif), "cwd": workdir, "executable": "apptainer", "timeout": 60}
    rows = {"start, ms": spread(timed(lambda: environment(**words).cleanup(), starts))}
    sandbox = environment(**words)
    done = sandbox.execute({"command": "true"})
    assert done["returncode"] == 0, done
    rows["first start of an image, ms"] = "the same"
    rows["first git status, ms"] = spread(timed(lambda: sandbox.execute({"command": LOOK}), 1))
    rows["second git status, ms"] = spread(timed(lambda: sandbox.execute({"command": LOOK}), 1))
    rows["`true`, ms"] = spread(timed(lambda: sandbox.execute({"command": "true"}), commands))
    rows["disk, each sandbox, MB"] = f"{disk_mb(sandbox.sandbox_dir):.0f}"
    sandbox.cleanup()
    return rows


def host(commands: int) -> dict[str, str]:
    def spawn() -> None:
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)

    return {"`true`, ms": spread(timed(spawn, commands))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("image", type=Path)
    parser.add_argument("workdir", nargs="?", default="/testbed")
    parser.add_argument("--starts", type=int, default=30)
    parser.add_argument("--commands", type=int, default=200)
    words = parser.parse_args()
    common = (words.image, words.workdir, words.starts, words.commands)
    with tempfile.TemporaryDirectory() as local:
        columns = {
            "ours": ours(*common, ""),
            "ours, `local`": ours(*common, local),
            "mini-swe-agent": mini(*common),
            "host": host(words.commands),
        }
    print(
        f"{words.image.name}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; median (95th of 100)\n"
    )
    print("| | " + " | ".join(columns) + " |\n|---" * 1 + "|---" * len(columns) + "|")
    for name in dict.fromkeys(name for rows in columns.values() for name in rows):
        print(f"| {name} | " + " | ".join(rows.get(name, "") for rows in columns.values()) + " |")


if __name__ == "__main__":
    main()
