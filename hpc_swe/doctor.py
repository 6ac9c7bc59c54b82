"""python -m hpc_swe.doctor [CONFIG...]: does this cluster give what a run needs? One line for each fault.

It asks Slurm three questions, then starts one job of some seconds per partition, whose nodes measure
themselves and each other. It changes nothing, and removes the one folder that it makes.
"""

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
from rich.markup import escape
from rich.table import Table

from hpc_swe import cli, tables
from hpc_swe import config as configuration
from hpc_swe.checkup import Ask, Finding, scheduler, visit
from hpc_swe.checkup.scheduler import Cluster
from hpc_swe.checkup.visit import ANSWER_S, Bench
from hpc_swe.errors import HpcSweError
from hpc_swe.records import Role
from hpc_swe.settings import RunConfig

COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}
OPTIONS = ("account", "qos", "reservation", "constraint")  # of sbatch, that srun needs too


def wanted(executor: dict[str, Any]) -> list[Ask]:
    """What the table [executor] asks of each partition; one without a name is the cluster's default."""
    asks: dict[str, Ask] = {}
    roles = executor.get("roles", {})
    for role in (roles.get(name, {}) for name in get_args(Role)):
        name = role.get("partition") or executor.get("partition", "")
        options = {**executor, **executor.get("options", {}), **role.get("options", {})}
        gpus = role.get("gpus_per_node", 0) or scheduler.gpus(str(options.get("gres", "")))
        words = tuple(f"--{option}={options[option]}" for option in OPTIONS if options.get(option))
        asks[name] = Ask(name, words, max(gpus, asks.get(name, Ask()).gpus))
    return list(asks.values())


def largest_array(config: RunConfig, executor: dict[str, Any]) -> int:
    """Jobs in the largest array that the executor submits."""
    limit: int = executor.get("array_size", 10**9)
    return min(max(config.counts.values(), default=1), limit)


def settle(cluster: Cluster, asks: Sequence[Ask], count: int) -> list[Ask]:
    """The same, with the default partition's name, and with as many nodes as there are."""
    default = next((each.name for each in cluster.partitions.values() if each.is_default), "")
    named = [replace(ask, partition=ask.partition or default) for ask in asks]
    usable = {name: each.nodes for name, each in cluster.partitions.items()}
    return [replace(ask, nodes=min(count, usable.get(ask.partition, 0))) for ask in named]


def examine(cluster: Cluster, asks: Sequence[Ask], jobs: int, bench: Bench) -> Iterator[Finding]:
    """What Slurm says, then what the nodes say of each partition that can be had."""
    yield from scheduler.findings(cluster, asks, jobs)
    for number, ask in enumerate(asks):
        if ask.nodes and ask.gpus <= cluster.partitions[ask.partition].gpus:
            yield from visit.partition(ask, replace(bench, folder=bench.folder / str(number)))


def ask_slurm() -> Cluster:
    """What Slurm says of itself.

    Raises:
        HpcSweError: It is not here, or does not answer.
    """
    if shutil.which("srun") is None:
        raise HpcSweError("there is no srun on PATH")
    return scheduler.parse(_show("config"), _show("partition", "-o"), _show("nodes", "-o"))


def _show(*what: str) -> str:
    command = ["scontrol", "show", *what]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HpcSweError(f"scontrol: {error}") from None
    if done.returncode:
        raise HpcSweError(f"scontrol: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout


def diagnose(arguments: argparse.Namespace) -> list[Finding]:
    """All findings for a parsed command line."""
    has_files = any("=" not in word for word in arguments.config)
    config = configuration.of_words(arguments.config) if has_files else None
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
        return [Finding("Slurm", "warning", str(error), remedy, "this machine"), *visit.alone(bench)]
    else:
        jobs = largest_array(config, executor) if config else 0
        return list(examine(cluster, settle(cluster, asks, arguments.nodes), jobs, bench))
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)


def table(findings: Sequence[Finding]) -> Table:
    """The worst last, where the eye is; the same in several places is one row."""
    drawn = Table()
    for heading in ("check", "where", "verdict", "found", "remedy"):
        drawn.add_column(heading, overflow="fold")  # an ellipsis is no ASCII, and hides the end of a path
    order, places = list(COLOURS), defaultdict[Finding, list[str]](list)
    for each in findings:
        places[replace(each, where="")].append(each.where.removeprefix("partition "))
    for each, where in sorted(places.items(), key=lambda pair: order.index(pair[0].verdict)):
        verdict = f"[{COLOURS[each.verdict]}]{each.verdict}[/]"
        drawn.add_row(each.check, ", ".join(where), verdict, escape(each.says), escape(each.remedy))
    return drawn


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
