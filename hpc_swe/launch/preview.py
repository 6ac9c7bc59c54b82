"""Print every batch script of a run and what it would cost, for `launch start --dry-run`; make nothing."""

import os
from collections.abc import Sequence
from contextlib import suppress

from rich.console import RenderableType

from hpc_swe.base import tables
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import submissions
from hpc_swe.cluster.executors.base import ResourceRequest
from hpc_swe.config import config as configuration
from hpc_swe.config import job_counts
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import checks, estimate, submit, trajectories, upgrades
from hpc_swe.launch.control import require_alike
from hpc_swe.launch.estimate import GpuNeed
from hpc_swe.models.costs import GIB, MemoryEstimate, Part

HOST = "host memory of the learner's job on each node"
BESIDE = "beside this: the programs themselves, and files that are read and written"


def preview(run: RunDir, config: RunConfig, words: Sequence[str] = ()) -> None:
    """Show what `start` would make and submit; raise ConfigError when `start` would refuse it."""
    config = upgrades.with_former_defaults(run, config, words)
    try:
        taken = checks.require(run, config)
        config = trajectories.resolved(run, config, taken.trajectories)
        if run.config.exists():
            require_alike(run, config)
    except ConfigError:
        with suppress(ConfigError):  # it is one of the complaints, too
            _show(run, config)
        raise
    _show(run, config)
    if taken.trajectories:
        tables.show(tables.screen(), trajectories.overview(taken.trajectories), "")


def _show(run: RunDir, config: RunConfig) -> None:
    print("### the merged configuration, with all defaults")
    print("\n".join(configuration.toml(configuration.dump(config))), end="\n\n")
    for script in scripts(run, config):
        print(script)
    console = tables.screen()
    for table in cost_tables(config):
        tables.show(console, table, "")


def scripts(run: RunDir, config: RunConfig) -> list[str]:
    """Return the scripts that an empty queue would get: one per array, below a line that counts its jobs."""
    found = []
    for role, count in job_counts.desired(config).items():
        number = submissions.newest(run, role).number if run.config.exists() else 0
        for first in range(0, count, config.executor.array_size):
            number, jobs = number + 1, min(config.executor.array_size, count - first)
            text = config.executor.script(run, submit.submission(run, config, role, number, jobs))
            found.append(f"### {role}: submission {number}, {jobs} of {count} jobs\n{text.rstrip()}\n")
    return found


def cost_tables(config: RunConfig) -> list[RenderableType]:
    """Return tables of jobs, memory of the GPUs, and room on disk."""
    found: list[RenderableType] = [_jobs(config), *estimate.crowded(config, len(os.sched_getaffinity(0)))]
    wanted, policy, engine = job_counts.desired(config), config.policy, config.engine
    if learner := estimate.learner(config):
        found += _memory(learner)
    elif wanted.get("learner"):
        found.append(f"learner: {type(policy).__name__} is no policy whose memory is known here")
    if served := estimate.engine(config):
        found += _memory(served)
    elif wanted.get("inference"):
        found.append(f"inference: {type(engine).__name__} is no engine whose memory is known here")
    found += [_verdict(need) for need in estimate.gpu_needs(config)]
    if kept := estimate.host(config):
        least = Part("at least", "", sum(part.bytes for part in kept))
        found += _memory(MemoryEstimate(HOST, kept, least, []), BESIDE)
    return [*found, _disk(estimate.disk(config))]


def _verdict(need: GpuNeed) -> str:
    """Say whether the learner or an engine fits on its GPU."""
    if not need.known_gib:
        where = f"executor.roles.{need.role}.gpu_gib"
        return f"{need.what}: no verdict, since the memory of its GPU is unknown: set {where}"
    if need.least_gib > need.known_gib:
        return f"{need.what}: does not fit: {need.verdict}"
    if need.is_tight:
        return f"{need.what}: may run out of memory: {need.verdict}, and its allocator up to 15 % more"
    return f"{need.what}: fits: {need.verdict}"


def _jobs(config: RunConfig) -> RenderableType:
    if config.executor.is_here:
        counts = ", ".join(f"{count} {role}" for role, count in job_counts.desired(config).items() if count)
        return f"local: {counts}, all on this machine; nothing is asked of a scheduler"
    found = estimate.requests(config)
    columns = ["jobs", "nodes", "cores", "mem GB", "GPUs", "hours", "node-h", "core-h", "GPU-h"]
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
