"""What `launch start --dry-run` prints: every batch script, and what the run would cost. It makes nothing."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from hpc_swe import config as configuration
from hpc_swe import job_counts
from hpc_swe import tables as drawn
from hpc_swe.plugins.engines.vllm import Vllm
from hpc_swe.plugins.executors.slurm import Slurm
from hpc_swe.plugins.policies._megatron.shape import ModelShape
from hpc_swe.plugins.policies.megatron import Megatron
from hpc_swe.rundir import RunDir
from hpc_swe.runs import checks, estimate, submit
from hpc_swe.runs.control import require_alike
from hpc_swe.runs.estimate import GIB, Part, Request
from hpc_swe.settings import RunConfig
from hpc_swe.store import submissions


def show(run: RunDir, config: RunConfig) -> None:
    """Print the merged configuration, the batch scripts and the costs.

    Raises:
        ConfigError: The model's config.json is missing, or describes what is not built here.
    """
    print("### the merged configuration, with all defaults")
    print("\n".join(configuration.toml(configuration.dump(config))), end="\n\n")
    for script in scripts(run, config):
        print(script)
    console = drawn.screen()
    for table in tables(config):
        drawn.show(console, table, "")


def scripts(run: RunDir, config: RunConfig) -> list[str]:
    """What an empty queue would be given: one script an array, each under a line that counts its jobs."""
    found = []
    for role, count in job_counts.desired(config).items():
        number = submissions.newest(run, role).number if run.config.exists() else 0
        for first in range(0, count, config.executor.array_size):
            number, jobs = number + 1, min(config.executor.array_size, count - first)
            text = config.executor.script(run, submit.submission(run, config, role, number, jobs))
            found.append(f"### {role}: submission {number}, {jobs} of {count} jobs\n{text.rstrip()}\n")
    return found


def tables(config: RunConfig) -> list[RenderableType]:
    """Jobs, memory of the GPUs, room on disk."""
    shape = ModelShape.read(Path(config.model))
    found: list[RenderableType] = [_jobs(config)]
    wanted = job_counts.desired(config)
    if wanted.get("learner"):
        found += _learner(config, shape)
    if wanted.get("inference"):
        found += _engine(config, shape)
    return [*found, _disk(estimate.disk(config, shape))]


def _jobs(config: RunConfig) -> RenderableType:
    if not isinstance(config.executor, Slurm):
        counts = ", ".join(f"{count} {role}" for role, count in job_counts.desired(config).items() if count)
        return f"local: {counts}, all on this machine; nothing is asked of a scheduler"
    requests = estimate.requests(config, config.executor)
    columns = ["jobs", "nodes", "cores", "mem GB", "GPUs", "hours", "node-h", "core-h", "GPU-h"]
    table = _table("asked of Slurm at once, and used in one walltime", ["role"], columns)
    for request in requests:
        table.add_row(request.role, *_numbers([request]))
    table.add_row("all", *_numbers(requests), style="bold")
    table.caption = "nodes and node-h: if jobs share none. A run that lasts longer than a walltime asks again"
    return table


def _numbers(requests: Sequence[Request]) -> list[str]:
    hours = {request.hours for request in requests}
    sums = [
        sum(request.jobs for request in requests),
        sum(request.nodes for request in requests),
        sum(request.cores for request in requests),
        sum(request.memory_gb for request in requests),
        sum(request.gpus for request in requests),
        hours.pop() if len(hours) == 1 else None,
        sum(request.nodes * request.hours for request in requests),
        sum(request.cores * request.hours for request in requests),
        sum(request.gpus * request.hours for request in requests),
    ]
    return [
        "" if number is None else f"{number:,.4g}" if number < 1e4 else f"{number:,.0f}" for number in sums
    ]


def _learner(config: RunConfig, shape: ModelShape) -> list[RenderableType]:
    policy, ranks = config.policy, config.learner.data_parallel
    if not isinstance(policy, Megatron):
        return [f"learner: {type(policy).__name__} is no policy whose memory is known here"]
    count = estimate.parameters(shape).total
    memory = estimate.learner_memory(shape, policy, ranks, config.batches.microbatch_tokens)
    title = f"memory of each learner GPU: P = {count:,}, tp = {policy.tensor_parallel}, dp = {ranks}"
    table = _memory(title, memory.parts)
    table.add_row("peak", "leave 15 % for the allocator", f"{memory.peak / GIB:.2f}", style="bold")
    pinned = estimate.host_memory(shape, policy, reference=config.learner.loss.kl_coefficient > 0)
    if not pinned:
        return [table]
    return [table, f"reference model: {pinned / GIB:.2f} GiB of host memory for each learner process"]


def _engine(config: RunConfig, shape: ModelShape) -> list[RenderableType]:
    engine = config.engine
    if not isinstance(engine, Vllm):
        return [f"inference: {type(engine).__name__} is no engine whose memory is known here"]
    parts = estimate.engine_memory(shape, engine, config.rollout.context)
    token = estimate.kv_token(shape, engine)
    table = _memory(f"memory of each engine GPU: tp = {engine.tensor_parallel}", parts)
    if engine.kv_cache_bytes:
        table.add_row("both", "", f"{estimate.total(parts).bytes / GIB:.2f}", style="bold")
    takes = "" if engine.kv_cache_bytes else "; vLLM takes what it finds free"
    return [table, f"KV cache: {token:,} bytes a token, {GIB // token:,} tokens a GiB{takes}"]


def _disk(parts: Sequence[Part]) -> RenderableType:
    title = "the run folder at its fullest, if every episode fills rollout.context"
    table = _table(title, ["what", "formula"], ["bytes", "inodes"])
    for part in parts:
        table.add_row(part.what, part.formula, _size(part.bytes), f"{part.inodes:,}")
    whole = estimate.total(parts)
    table.add_row(whole.what, whole.formula, _size(whole.bytes), f"{whole.inodes:,}", style="bold")
    return table


def _memory(title: str, parts: Iterable[Part]) -> Table:
    table = _table(title, ["part", "formula"], ["GiB"])
    for part in parts:
        table.add_row(part.what, part.formula, f"{part.bytes / GIB:.2f}")
    return table


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(*words, title=title, box=None, title_justify="left", caption_justify="left")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.4g} TB"


def preview(run: RunDir, config: RunConfig) -> None:
    """Show what `start` would make and submit.

    Raises:
        ConfigError: `start` would refuse it.
    """
    try:
        show(run, config)
    finally:
        checks.require(run, config)
        if run.config.exists():
            require_alike(run, config)
