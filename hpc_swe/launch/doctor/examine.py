"""Ask Slurm and the nodes of each partition, and make a table of the findings."""

import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, get_args

from rich.markup import escape
from rich.table import Table

from hpc_swe.base.errors import ConfigError, HpcSweError
from hpc_swe.base.records import Role
from hpc_swe.cluster.gpus import in_options
from hpc_swe.cluster.processes import completed
from hpc_swe.config import job_counts
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import estimate
from hpc_swe.launch.doctor import scheduler, srun
from hpc_swe.launch.doctor.findings import ComputingNeeds, Finding, JobNeeds, PartitionNeeds
from hpc_swe.launch.doctor.scheduler import Cluster
from hpc_swe.launch.doctor.srun import ANSWER_S, ProbeSetup
from hpc_swe.models.model_shape import ModelShape

COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}
NOTHING: Mapping[Role, tuple[ComputingNeeds, ...]] = {}
NO_JOBS: Mapping[Role, JobNeeds] = {}
OPTIONS = ("account", "qos", "reservation", "constraint")  # of sbatch, that srun needs too


def wanted(
    executor: dict[str, Any],
    computing: Mapping[Role, tuple[ComputingNeeds, ...]] = NOTHING,
    jobs: Mapping[Role, JobNeeds] = NO_JOBS,
) -> list[PartitionNeeds]:
    """Return what the table [executor] needs of each partition; an empty name is the cluster's default."""
    needs: dict[str, PartitionNeeds] = {}
    for owner in get_args(Role):
        role = executor.get("roles", {}).get(owner, {})
        name = role.get("partition") or executor.get("partition", "")
        options = {**executor, **executor.get("options", {}), **role.get("options", {})}
        gpus = in_options(options) or role.get("gpus_per_node", 0)
        given = tuple(f"--{option}={options[option]}" for option in OPTIONS if options.get(option))
        other = needs.get(name, PartitionNeeds())
        nodes = max(role.get("nodes", 1), other.job_nodes)
        work = other.computing + computing.get(owner, ())
        sizes = other.jobs + ((jobs[owner],) if owner in jobs else ())
        needs[name] = PartitionNeeds(name, given, max(gpus, other.gpus), nodes, computing=work, jobs=sizes)
    return list(needs.values())


def computing(config: RunConfig) -> dict[Role, tuple[ComputingNeeds, ...]]:
    """Return by role what the learner and the engines of a run need of the nodes that they compute on."""
    least = {need.what: need.least_gib for need in estimate.costs(config, estimate.jobs(config)).gpus}
    experts = _has_experts(Path(config.model))
    learner = ComputingNeeds("learner", config.policy, least.get("learner", 0.0), experts)
    engine = ComputingNeeds("engine", config.engine, least.get("engine", 0.0), experts)
    wanted = job_counts.desired(config)
    if job_counts.is_hybrid(config):
        return {"learner": (learner, engine)}
    rows: list[tuple[Role, ComputingNeeds]] = [("learner", learner), ("inference", engine)]
    return {role: (needs,) for role, needs in rows if wanted.get(role)}


def _has_experts(model: Path) -> bool:
    """Return whether the model has experts; False where it cannot be read, of which a start tells."""
    try:
        return ModelShape.read(model).experts > 0
    except ConfigError:
        return False


def job_needs(config: RunConfig) -> dict[Role, JobNeeds]:
    """Return by role what one job asks of each of its nodes; nothing without a scheduler."""
    found = {}
    for role, jobs in estimate.jobs(config).items():
        if request := jobs.request:
            cores = math.ceil(request.cores / request.nodes)
            memory_gb = jobs.memory_grant.gib if jobs.memory_grant else 0.0
            found[role] = JobNeeds(role, 60 * request.hours, cores, memory_gb)
    return found


def cores(config: RunConfig) -> Iterator[Finding]:
    """Yield the findings about slots of workers that are more than their cores serve."""
    crowded = estimate.crowded(config, estimate.jobs(config), len(os.sched_getaffinity(0)))
    found = [message.rpartition(": ") for message in crowded]
    for says, _, remedy in found:
        yield Finding("cores", "warning", says, remedy)
    if not found:
        yield Finding("cores", "ok", "each role has enough for its slots")


def resolve(cluster: Cluster, needs: Sequence[PartitionNeeds], count: int) -> list[PartitionNeeds]:
    """Fill in the default partition's name, and limit the nodes to probe to those that are usable."""
    default = next((each.name for each in cluster.partitions.values() if each.is_default), "")
    named = [replace(need, partition=need.partition or default) for need in needs]
    usable = {name: each.nodes for name, each in cluster.partitions.items()}
    return [replace(need, nodes=min(count, usable.get(need.partition, 0))) for need in named]


def examine(
    cluster: Cluster, needs: Sequence[PartitionNeeds], jobs: int, setup: ProbeSetup
) -> Iterator[Finding]:
    """Yield the findings about Slurm, then those about the nodes of each usable partition."""
    yield from scheduler.findings(cluster, needs, jobs)
    for number, need in enumerate(needs):
        if need.nodes and need.gpus <= cluster.partitions[need.partition].gpus:
            yield from srun.probe_partition(need, replace(setup, folder=setup.folder / str(number)))


def ask_slurm() -> Cluster:
    """Read the cluster from scontrol; raise HpcSweError if Slurm is not installed or does not answer."""
    if shutil.which("srun") is None:
        raise HpcSweError("srun is not on PATH")
    return scheduler.parse(_show("config"), _show("partition", "-o"), _show("nodes", "-o"))


def _show(*what: str) -> str:
    command = ["scontrol", "show", *what]
    try:
        done = completed(Popen(command, text=True, stdout=PIPE, stderr=PIPE), ANSWER_S)
    except (OSError, TimeoutExpired) as error:
        raise HpcSweError(f"scontrol: {error}") from None
    if done.returncode:
        raise HpcSweError(f"scontrol: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout


def table(findings: Sequence[Finding]) -> Table:
    """Return the findings as a table, the worst last; equal findings of several places share a row."""
    rows = Table()
    for heading in ("check", "where", "verdict", "found", "remedy"):
        rows.add_column(heading, overflow="fold")  # an ellipsis is not ASCII, and hides the end of a path
    order, places = list(COLOURS), defaultdict[Finding, list[str]](list)
    for each in findings:
        places[replace(each, where="")].append(each.where.removeprefix("partition "))
    for each, where in sorted(places.items(), key=lambda pair: order.index(pair[0].verdict)):
        verdict = f"[{COLOURS[each.verdict]}]{each.verdict}[/]"
        rows.add_row(each.check, ", ".join(where), verdict, escape(each.says), escape(each.remedy))
    return rows
