"""Print a plan for `launch start --dry-run`: what the run would cost, then its batch scripts."""

import os
from collections.abc import Sequence
from contextlib import suppress

from rich.console import RenderableType

from hpc_swe.base import tables
from hpc_swe.base.errors import ConfigError
from hpc_swe.cluster.executors.base import ResourceRequest
from hpc_swe.config import config as configuration
from hpc_swe.launch import estimate, trajectories
from hpc_swe.launch.estimate import GpuNeed
from hpc_swe.launch.plan import RunPlan
from hpc_swe.models.costs import GIB, MemoryEstimate, Part

HOST = "host memory of the learner's job on each node"
SHORT = 1.1  # of the parts of host memory: programs come on top
BESIDE = "beside this: the programs themselves, and files that are read and written"


def show(plan: RunPlan, *, full: bool = False) -> None:
    """Print what the plan costs and submits, as far as nothing that is refused hides it.

    With `full` the merged configuration follows.
    """
    console = tables.screen()
    for table in cost_tables(plan):
        tables.show(console, table, "")
    if plan.taken.trajectories:
        tables.show(console, trajectories.overview(plan.taken.trajectories), "")
    with suppress(ConfigError):  # a complaint of the start says it
        for script in scripts(plan):
            print(script)
    if full:
        print("### the merged configuration, with all defaults")
        print("\n".join(configuration.toml(configuration.dump(plan.config))))


def scripts(plan: RunPlan) -> list[str]:
    """Return the script of each submission, below a line that counts its jobs."""
    script, found = plan.config.executor.script, []
    for each in plan.submissions:
        head = f"### {each.role}: submission {each.number}, {each.count} of {plan.jobs[each.role].count} jobs"
        found.append(f"{head}\n{script(plan.run, each).rstrip()}\n")
    return found


def cost_tables(plan: RunPlan) -> list[RenderableType]:
    """Return tables of jobs, whether all fits, and the tables of memory and disk that say why."""
    config, costs, cores = plan.config, plan.costs, len(os.sched_getaffinity(0))
    found: list[RenderableType] = [_jobs(plan), *estimate.crowded(config, plan.jobs, cores)]
    found += [_verdict(need) for need in costs.gpus]
    for role, part, needed in (("learner", "policy", costs.learner), ("inference", "engine", costs.engine)):
        if needed:
            found += _memory(needed)
        elif role in plan.jobs:
            found.append(
                f"{role}: memory not known: no model folder (its config.json alone is enough), a layout that "
                f"cannot be, or this {part} estimates none"
            )
    if costs.host:
        least = Part("at least", "", sum(part.bytes for part in costs.host))
        found += _memory(MemoryEstimate(HOST, [*costs.host], least, [_host_verdict(plan)]), BESIDE)
    return [*found, *([_disk(costs.disk)] if costs.disk else [])]


def _verdict(need: GpuNeed) -> str:
    """Say whether the learner or an engine fits on its GPU."""
    if not need.known_gib:
        where = f"executor.roles.{need.role}.gpu_gib"
        return f"{need.what}: no verdict, since the memory of its GPU is unknown: set {where}"
    if need.least_gib > need.known_gib:
        return f"{need.what}: does not fit: {need.verdict}"
    if need.is_tight:
        return f"{need.what}: may run out of memory: {need.verdict}, and its allocator up to 15 % more"
    if not need.chosen:
        return f"{need.what}: fits: {need.verdict}"
    most = need.choices[need.chosen] / GIB
    return (
        f"{need.what}: fits: {need.verdict}, with policy.recompute = {[*need.choices][-1]!r}, as in the "
        f"table; 'auto' will take {need.chosen!r}, of {most:.1f} GiB with all reserves"
    )


def _host_verdict(plan: RunPlan) -> str:
    """Say whether a node gives the learner's job the parts that are listed; programs come on top."""
    needed, grant = sum(part.bytes for part in plan.costs.host) / GIB, plan.jobs["learner"].memory_grant
    if not grant:
        return "host memory: no verdict: an option of sbatch, or this machine, says how much the job gets"
    verdict = "the parts listed fit" if needed <= grant.gib else "does not fit"
    verdict = "may be short" if needed <= grant.gib < SHORT * needed else verdict
    more = "; ask for a tenth more, for programs" * (verdict == "may be short")
    return f"host memory: {verdict}: the job keeps at least {needed:.1f} GiB, and executor.{grant.key}{more}"


def _jobs(plan: RunPlan) -> RenderableType:
    if plan.config.executor.is_here:
        counts = ", ".join(f"{jobs.count} {role}" for role, jobs in plan.jobs.items())
        return f"local: {counts}, all on this machine; nothing is asked of a scheduler"
    found = [jobs.request for jobs in plan.jobs.values() if jobs.request]
    columns = ["jobs", "nodes", "cores", "mem GB", "GPUs", "wall h", "node-h", "core-h", "GPU-h"]
    table = tables.table(["role"], columns, title="asked of Slurm at once, and used in one walltime")
    for each in found:
        table.add_row(each.role, *_numbers([each]))
    table.add_row("all", *_numbers(found), style="bold")
    table.caption = "nodes and node-h: if jobs share none. A run that lasts longer than a walltime asks again"
    return table


def _numbers(found: Sequence[ResourceRequest]) -> list[str]:
    asked = [(each.jobs, each.nodes, each.cores, each.memory_gb, each.gpus) for each in found] or [(0,) * 5]
    hours = {each.hours for each in found}
    used = [[n * each.hours for n in (each.nodes, each.cores, each.gpus)] for each in found] or [[0.0] * 3]
    walltime = hours.pop() if len(hours) == 1 else None
    sums = [*map(sum, zip(*asked, strict=True)), walltime, *map(sum, zip(*used, strict=True))]
    return [
        "" if number is None else f"{number:,.4g}" if number < 1e4 else f"{number:,.0f}" for number in sums
    ]


def _disk(parts: Sequence[Part]) -> RenderableType:
    title = "the run folder at its fullest, if every episode fills rollout.context"
    table = tables.table(["what", "formula"], ["bytes", "inodes"], title=title)
    for part in parts:
        table.add_row(part.what, part.formula, _size(part.bytes), f"{part.inodes:,}")
    whole = _size(sum(part.bytes for part in parts)), f"{sum(part.inodes for part in parts):,}"
    table.add_row("all", "", *whole, style="bold")
    return table


def _memory(found: MemoryEstimate, caption: str = "") -> list[RenderableType]:
    table = tables.table(["part", "formula"], ["GiB"], title=found.title)
    for part in found.parts:
        table.add_row(part.what, part.formula, f"{part.bytes / GIB:.2f}")
    if found.total:
        table.add_row(found.total.what, found.total.formula, f"{found.total.bytes / GIB:.2f}", style="bold")
    table.caption = caption or None
    return [table, *found.notes]


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.4g} TB"
