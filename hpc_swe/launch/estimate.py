"""Estimate what a run will use before it is started: resources of the scheduler, and room on disk.

The functions are pure. Every number is a sum of `Part`s, each with its formula, so that a reader who doubts a
total can check it. Policies and engines estimate their own memory. The room on disk is what the run would use
if every episode filled its context.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Role
from hpc_swe.cluster.executors.base import GpuGrant, MemoryGrant, ResourceRequest
from hpc_swe.config.job_counts import desired, engines_beside, gpus, is_hybrid, processes
from hpc_swe.config.settings import RunConfig
from hpc_swe.models.costs import GIB, MemoryEstimate, Part
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies.base import WRITERS
from hpc_swe.roles.coordinator.modes import evaluation, replay, sft, training

T = TypeVar("T")
BATCH_TOKEN = 17  # bytes of a token in a batch: id, log-probability, advantage, weight of 4 each; mask
EPISODE_TOKEN = 12  # bytes of a token in an episode: id, log-probability, about four letters of messages
COMPANIONS, COMPANION_FILES = 16e6, 8  # bytes and files of a tokenizer and of settings beside weights
CODE, CODE_FILES = 1.5e6, 240  # bytes and files of the packages that a run copies for its jobs
CURVES = 12e3  # bytes of metrics a step, of coordinator and learner, with drawn curves
LOG_LINE = 150  # bytes that an episode leaves in logs
MOVED = ("weights", "optimizer", "last version, for deltas")  # parts of a GPU that outlast a step
SPARE = 1.15  # what a learner's allocator may reserve for each byte in use
CONTEXT_GIB = 1.0  # what CUDA takes of a GPU before anything is on it
SMALLER = (
    "divide it among more GPUs (policy.tensor_parallel, learner.data_parallel), or let it need less "
    "(policy.recompute, policy.offload_optimizer, batches.microbatch_tokens)"
)
MOST_PER_CORE: dict[Role, int] = {"rollout": 16, "reward": 2}
"""Slots that one core serves: episodes mostly wait for their engine, and gradings compute."""
AHEAD = {"grpo": training.AHEAD, "sft": sft.AHEAD, "replay": replay.AHEAD}


@dataclass(frozen=True)
class RoleJobs:
    """Describe the jobs of one role, and what each gets of its executor."""

    count: int
    processes: int
    """Processes of each job."""
    gpus: int | None
    """GPUs that each job computes on; None where the plugin does not know."""
    gpu_grant: GpuGrant | None
    memory_grant: MemoryGrant | None
    request: ResourceRequest | None
    """What all jobs ask of a scheduler together; None where there is none."""

    @property
    def nodes(self) -> int:
        """Return the nodes of each job."""
        return self.request.nodes // self.count if self.request else 1


def jobs(config: RunConfig) -> dict[Role, RoleJobs]:
    """Return the jobs of each role that has some."""
    counts = {role: count for role, count in desired(config).items() if count}
    sizes = {role: (processes(role, config), gpus(role, config)) for role in counts}
    executor = config.executor
    return {
        role: RoleJobs(
            count,
            *sizes[role],
            executor.gpu_grant(role),
            executor.memory_grant(role),
            executor.request(role, count, sizes[role][0]),
        )
        for role, count in counts.items()
    }


def crowded(config: RunConfig, asked: Mapping[Role, RoleJobs], cores_here: int) -> Iterator[str]:
    """Say which workers run more sandboxes than their cores serve; jobs of one machine share its cores."""
    slots: dict[Role, int] = {"rollout": config.rollout.slots, "reward": config.reward.slots}
    for role, each in slots.items():
        if role not in asked:
            continue
        count, cores, where = asked[role].count, cores_here, "this machine"
        remedy = f"set {role}.slots or counts.{role} lower"
        if request := asked[role].request:
            count, cores, where = 1, request.cores // request.jobs, "each job"
            remedy = f"give it {math.ceil(each / MOST_PER_CORE[role])} cores, or set {role}.slots lower"
        if count * each > MOST_PER_CORE[role] * cores:
            yield (
                f"{role}.slots = {each}: {count * each} sandboxes at once wait for each other on the "
                f"{cores} cores of {where}; a core serves about {MOST_PER_CORE[role]}: {remedy}"
            )


@dataclass(frozen=True)
class GpuNeed:
    """Compare what the learner or an engine needs of a GPU with what the GPU has."""

    what: str
    role: Role
    """Whose job has the GPU."""
    least_gib: float
    known_gib: float
    """Memory of the GPU; 0 is unknown."""
    remedy: str
    choices: Mapping[str, float]
    """Bytes that must be free for each setting between which it chooses, the best first; the last is taken
    where none fits. Empty where it has no choice."""

    @property
    def verdict(self) -> str:
        return f"it needs at least {self.least_gib:.1f} GiB of a GPU that has {self.known_gib:.1f} GiB"

    @property
    def chosen(self) -> str:
        """Return the setting that it will choose; empty where it has no choice, or the GPU is unknown."""
        if not self.known_gib:
            return ""
        free = (self.known_gib - CONTEXT_GIB) * GIB
        fitting = [name for name, needed in self.choices.items() if needed <= free]
        return [*fitting, *[*self.choices][-1:], ""][0]

    @property
    def is_tight(self) -> bool:
        """Return whether the learner's allocator may run out, which may reserve 15 % more, and CUDA 1 GiB."""
        return self.what == "learner" and self.least_gib * SPARE + 1 > self.known_gib


@dataclass(frozen=True)
class Costs:
    """Hold the estimates of a run; those of a model that cannot be read are empty."""

    learner: MemoryEstimate | None = None
    """None without a learner, and for a policy that does not know its memory."""
    engine: MemoryEstimate | None = None
    """None where the run starts no engine, and for one that does not know its memory."""
    gpus: Sequence[GpuNeed] = ()
    """What learner and engines need of each GPU."""
    host: Sequence[Part] = ()
    """What the learner's job surely keeps in the memory of each node, beside programs."""
    disk: Sequence[Part] = ()
    """Bytes and inodes of the run folder at its fullest, during the run or at its end."""


def costs(config: RunConfig, asked: Mapping[Role, RoleJobs]) -> Costs:
    """Estimate what the jobs of a run need. A check of the start says why a model cannot be read."""
    wanted, model, policy = desired(config), Path(config.model), config.policy
    sizes = (config.learner.data_parallel, config.batches.microbatch_tokens)
    learner = files = engine = None
    if wanted.get("learner"):
        learner = _readable(lambda: policy.memory(model, *sizes, config.kept))
        files = _readable(lambda: policy.files(model))
    if wanted.get("inference") or is_hybrid(config):
        engine = _readable(lambda: config.engine.memory(model, config.rollout.context))
    return Costs(
        learner,
        engine,
        _gpu_needs(config, asked, learner, engine),
        _host(config, asked["learner"], learner, engine) if learner else [],
        _readable(lambda: _disk(config, files)) or [],
    )


def _readable(estimate: Callable[[], T]) -> T | None:
    """Return an estimate; None if its model cannot be read, which others may not need."""
    try:
        return estimate()
    except ConfigError:
        return None


def _gpu_needs(
    config: RunConfig,
    asked: Mapping[Role, RoleJobs],
    found: MemoryEstimate | None,
    served: MemoryEstimate | None,
) -> list[GpuNeed]:
    beside: Role = "learner" if is_hybrid(config) else "inference"
    rows: list[tuple[str, Role, MemoryEstimate | None, str]] = [
        ("learner", "learner", found, SMALLER),
        ("engine", beside, served, "divide it among more GPUs (engine.tensor_parallel)"),
    ]
    needs = []
    for what, role, estimate, remedy in rows:
        if estimate is None or not estimate.least or not gpus(what.replace("engine", "inference"), config):
            continue
        grant = asked[role].gpu_grant if role in asked else None
        known_gib = grant.gib if grant else 0.0
        needs.append(GpuNeed(what, role, estimate.least / GIB, known_gib, remedy, estimate.choices))
    return needs


def _host(
    config: RunConfig, job: RoleJobs, found: MemoryEstimate, served: MemoryEstimate | None
) -> list[Part]:
    count = job.processes // (job.memory_grant.nodes if job.memory_grant else 1)
    parts = [Part(each.what, f"{count} x {each.formula}", count * each.bytes) for each in found.host]
    if not is_hybrid(config):
        return parts
    parts.append(_moved("hybrid: the learner's state", count, found))
    if served and config.engine.gpus:
        workers = engines_beside("learner", config) * config.engine.gpus
        parts.append(_moved("hybrid: engines asleep", workers, served, ", at most twice"))
        for each in served.host:
            parts.append(
                Part(f"hybrid: engines' {each.what}", f"{workers} x {each.formula}", workers * each.bytes)
            )
    return parts


def _moved(what: str, count: int, found: MemoryEstimate, more: str = "") -> Part:
    """Estimate what so many processes move to host memory while the other half of a hybrid run computes.

    vLLM rounds the sizes of its tensors up to powers of two.
    """
    size = sum(part.bytes for part in found.parts if part.what in MOVED)
    return Part(what, f"{count} x {size / GIB:.2f} GiB{more}", count * size)


def _disk(config: RunConfig, files: tuple[Part, Part] | None) -> list[Part]:
    """Estimate the run folder, of a policy that writes such `files` for a version and a checkpoint."""
    roles = desired(config)
    parts = [Part("code/, tasks", "a copy of the packages", CODE, CODE_FILES)]
    if "learner" in roles:
        parts += _states(config, *files) if files else []
        parts.append(_batches(config))
    if "rollout" in roles:
        parts += _episodes(config)
    count = sum(roles.values())
    curves = Part("metrics/, tensorboard/", f"{CURVES / 1e3:.0f} kB a step", config.steps * CURVES, 2 * count)
    return [*parts, curves, Part("nodes/, launch/, logs/", "three files a job", count * 5e3, 4 * count)]


def _states(config: RunConfig, weights: Part, checkpoint: Part) -> list[Part]:
    """Estimate all versions of the weights, and all checkpoints."""
    learner, kept = config.learner, config.retention
    ranks = config.policy.processes * learner.data_parallel

    def milestones(made_every: int) -> int:
        return config.steps // math.lcm(kept.keep_every, made_every) if kept.keep_every else 0

    def evaluated(made_every: int) -> int:
        """Count what is kept of the best evaluation, and of the one under way."""
        if config.mode != "grpo" or not config.eval.every:
            return 0
        return min(2, config.steps // math.lcm(config.eval.every, made_every))

    versions = kept.keep_last + 1 + milestones(learner.export_every) + evaluated(learner.export_every)
    saved_every = 1 if learner.checkpoint_s else learner.checkpoint_every
    saved = 2 + 1 + milestones(saved_every) + evaluated(saved_every)
    return [
        Part(
            weights.what,
            f"{_kept_words(kept.keep_last, versions)} x {weights.formula}",
            versions * (weights.bytes + COMPANIONS),
            versions * (ranks + COMPANION_FILES + 3),
        ),
        Part(
            checkpoint.what,
            f"{_kept_words(2, saved)} x {checkpoint.formula}",
            saved * checkpoint.bytes,
            saved * (WRITERS * ranks + 5),
        ),
    ]


def _kept_words(last: int, total: int) -> str:
    more = f" + {total - last - 1} kept" if total > last + 1 else ""
    return f"({last} + 1 being written{more})"


def _batches(config: RunConfig) -> Part:
    """Estimate the batches from the older of two checkpoints on, with those ahead of the learner."""
    samples = config.groups.groups_per_step * config.groups.group_size
    samples = config.sft.samples_per_step if config.mode == "sft" else samples
    kept = min(config.steps, 2 * config.learner.checkpoint_every + AHEAD[config.mode] + 1)
    tokens, token = samples * config.rollout.context, BATCH_TOKEN + _routing(config)
    return Part(
        "batches/",
        f"{kept} x {tokens:,} tokens x {token} bytes",
        float(kept * tokens * token),
        kept * (config.learner.data_parallel + 2),
    )


def _routing(config: RunConfig) -> int:
    """Return the bytes by which the experts of a token enlarge messages and batches; the archive has none."""
    asks = config.engine.return_routing and config.mode == "grpo"
    return ModelShape.read(Path(config.model)).routing_bytes if asks else 0


def _episodes(config: RunConfig) -> list[Part]:
    """Estimate what is in the spools, and what is kept of it."""
    size, groups, steps = config.rollout.context * EPISODE_TOKEN, config.groups, config.steps
    step = groups.groups_per_step * groups.group_size
    flying = step * (groups.max_staleness + 1)
    if config.mode == "eval":
        flying = min(evaluation.OUTSTANDING, _evaluated(config))
        return [
            Part("spools, at most", f"{flying} messages", float(flying * size), flying),
            _tables(config, 1),
        ]
    in_spool = float(config.rollout.context * (EPISODE_TOKEN + _routing(config)))
    return [
        Part("archive/", f"{steps} x {step} episodes, before zstd", float(steps * step * size), steps),
        Part("spools, at most", f"{flying} messages, if all have signal", flying * in_spool, flying),
        Part("logs/", f"{LOG_LINE} bytes an episode", float(steps * step * LOG_LINE)),
        _tables(config, steps // config.eval.every if config.eval.every else 0),
    ]


def _evaluated(config: RunConfig) -> int:
    tasks = min(config.eval.tasks or config.tasks.eval, config.tasks.eval)
    return tasks * len(config.eval.attempts)


def _tables(config: RunConfig, rounds: int) -> Part:
    rows = _evaluated(config)
    size = config.rollout.context * EPISODE_TOKEN
    return Part("evals/", f"{rounds} x {rows} episodes, before zstd", float(rounds * rows * size), rounds)
