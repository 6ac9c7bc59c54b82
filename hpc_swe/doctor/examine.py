"""Ask Slurm and the nodes of each partition, and draw what was found."""

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

from rich.markup import escape
from rich.table import Table

from hpc_swe.doctor import scheduler, srun
from hpc_swe.doctor.findings import Ask, Finding
from hpc_swe.doctor.scheduler import Cluster
from hpc_swe.doctor.srun import ANSWER_S, Bench
from hpc_swe.errors import HpcSweError
from hpc_swe.gpus import in_gres
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
        gpus = role.get("gpus_per_node", 0) or in_gres(str(options.get("gres", "")))
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
            yield from srun.partition(ask, replace(bench, folder=bench.folder / str(number)))


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
