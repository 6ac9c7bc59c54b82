"""python -m hpc_swe.doctor [CONFIG...]: does this cluster give what a run needs? One line for each fault.

It asks Slurm three questions, then starts one job of some seconds per partition, whose nodes measure
themselves and each other. It changes nothing, and removes the one folder that it makes.
"""

import argparse
import os
import secrets
import shutil
import sys
import time
from pathlib import Path

import msgspec

from hpc_swe import cli, tables
from hpc_swe import config as configuration
from hpc_swe.doctor import srun
from hpc_swe.doctor.examine import ask_slurm, examine, largest_array, settle, table, wanted
from hpc_swe.doctor.findings import Ask, Finding
from hpc_swe.doctor.srun import Bench
from hpc_swe.errors import HpcSweError


def diagnose(arguments: argparse.Namespace) -> list[Finding]:
    """All findings for a parsed command line."""
    has_files = any("=" not in word for word in arguments.config)
    config = configuration.from_words(arguments.config) if has_files else None
    tree = configuration.dump(config) if config else {}
    executor, sandbox = tree.get("executor", {}), tree.get("sandbox", {})
    asks = [Ask(name, gpus=arguments.gpus) for name in arguments.partition] or wanted(executor)
    images = str(Path(sandbox["images"]).absolute()) if sandbox.get("type") == "apptainer" else ""
    token = secrets.token_hex(4)
    shared = arguments.shared or Path(os.environ.get("HPC_SWE_RUNS", "runs"))
    bench = Bench(shared.absolute() / f".doctor-{token}", token, arguments.python, images, arguments.timeout)
    try:
        cluster = ask_slurm()
    except HpcSweError as error:
        remedy = "start this where sbatch works; all that follows is of this machine alone"
        return [Finding("Slurm", "warning", str(error), remedy, "this machine"), *srun.alone(bench)]
    else:
        jobs = largest_array(config, executor) if config else 0
        return list(examine(cluster, settle(cluster, asks, arguments.nodes), jobs, bench))
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_swe.doctor", description="Check a cluster; name each fault with its remedy."
    )
    add = parser.add_argument
    add("config", nargs="*", help="as for `launch start`: its partitions, GPUs and images are tried")
    add("--shared", type=Path, help="the shared folder (default: $HPC_SWE_RUNS or runs/)")
    add("--partition", action="append", default=[], help="repeatable (default: the configuration's)")
    add("--gpus", type=int, default=0, help="GPUs of each node to ask a --partition for")
    add("--nodes", type=int, default=2, help="nodes to probe in each partition (default: 2)")
    add("--timeout", type=float, default=120.0, help="seconds that a partition has to answer (default: 120)")
    add("--python", default=sys.executable, help="the interpreter of jobs (default: this one)")
    add("--json", action="store_true", help="the findings as JSON, for programs")
    return parser


@cli.command
def main() -> int:
    """The command line."""
    os.umask(0o077)
    begun = time.monotonic()
    arguments = cli.parse(_parser())
    findings = diagnose(arguments)
    verdicts = [finding.verdict for finding in findings]
    if arguments.json:
        print(msgspec.json.encode(findings).decode())
        return "fault" in verdicts
    console = tables.screen()
    tables.show(console, table(findings))
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("ok", "warning", "fault"))
    console.print(f"{counts}, in {time.monotonic() - begun:.0f} s")
    return "fault" in verdicts


if __name__ == "__main__":
    main()
