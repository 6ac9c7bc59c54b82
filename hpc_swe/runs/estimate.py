"""What a run will cost, before it is started: jobs, memory of a GPU, room on the shared file system.

Pure functions of the configuration and of the model's config.json. Every number is a sum, and every part
of it is a `Part` with its formula, so that whoever doubts a total sees where it comes from. Parameters are
counted exactly; the learner's memory was held against one H200 and is right to a few per cent
(tests/unit/test_estimate.py has the measurements); what lies on disk is what would lie there if every
episode filled its context.

    P parameters   L layers   h hidden   H, G heads and key-value heads times head_dim   f inner width
    V vocabulary   T tokens of a microbatch   c logprob_chunk   k experts a token   tp, dp parallel sizes
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from hpc_swe.job_counts import desired
from hpc_swe.plugins.engines.vllm import Vllm
from hpc_swe.plugins.executors.slurm import Resources, Slurm
from hpc_swe.plugins.policies._megatron.shape import ModelShape
from hpc_swe.plugins.policies.megatron import Megatron
from hpc_swe.records import Role
from hpc_swe.roles.coordinator import evaluation, sft, training
from hpc_swe.settings import RunConfig

GIB = 2**30
BATCH_TOKEN = 17
"""Bytes of a token in a batch: id, log-probability, advantage, weight of 4 each, and the mask."""
EPISODE_TOKEN = 12
"""Bytes of a token in an episode: id, log-probability, and about four letters in its messages."""
COMPANIONS, COMPANION_FILES = 16e6, 8
"""Tokenizer and settings beside weights."""
CODE, CODE_FILES = 1.5e6, 240
"""The copy of the packages that jobs import."""
CURVES = 12e3
"""Bytes of metrics a step, coordinator's and learner's, drawn ones too."""
LINE = 150
"""Bytes that an episode leaves in logs."""
AHEAD = {"grpo": training.AHEAD, "sft": sft.AHEAD}


@dataclass(frozen=True)
class Part:
    """One summand."""

    what: str
    formula: str
    bytes: float
    inodes: int = 0


@dataclass(frozen=True)
class Parameters:
    """How many numbers a model has, by how tensor parallelism divides them."""

    split: int
    """Divided among the ranks."""
    whole: int
    """On every rank: norms and routers."""

    @property
    def total(self) -> int:
        """As `sum(p.numel() for p in model.parameters())`."""
        return self.split + self.whole

    def of_rank(self, ranks: int) -> int:
        """On each of so many ranks."""
        return self.split // ranks + self.whole


@dataclass(frozen=True)
class LearnerMemory:
    """Of one GPU."""

    parts: list[Part]
    peak: float
    """Bytes in use at the worst moment; the allocator reserves up to 15 % more, CUDA about 1 GiB."""


@dataclass(frozen=True)
class Request:
    """What all jobs of one role ask of the scheduler together, for one walltime."""

    role: Role
    jobs: int
    nodes: int
    cores: int
    memory_gb: float
    gpus: int
    hours: float


def parameters(shape: ModelShape) -> Parameters:
    """Counted as the model is built.

    A layer has q, k, v and o of h (2 H + 2 G), their biases if any, an MLP of 3 h f or as many as experts
    with a router of h, two norms of h, and norms of q and k of head_dim each. Around the layers: embedding,
    output unless tied, final norm.
    """
    heads, groups = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    attention = shape.hidden * (2 * heads + 2 * groups) + shape.qkv_bias * (heads + 2 * groups)
    mlp = 3 * shape.hidden * shape.ffn * max(1, shape.experts)
    norms = 2 * shape.hidden + 2 * shape.head_dim * shape.qk_norm + shape.hidden * shape.experts
    tables = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    split = shape.layers * (attention + mlp) + tables
    return Parameters(split, whole=shape.layers * norms + shape.hidden)


def learner_memory(shape: ModelShape, policy: Megatron, data_parallel: int, tokens: int) -> LearnerMemory:
    """Of one rank, with microbatches of so many tokens.

    States, as Megatron's DistributedDataParallel and (Distributed)Optimizer hold them: in bfloat16 2 bytes of
    weight, 4 of gradient, and 12 of optimizer (float32 weight, two moments), these divided by dp when
    the optimizer is distributed; in float32 4, 4 and 8. AdamW's step makes one more float32 of its share.
    The reference model lies in host memory, and takes none here.

    Not foreseen: float32 attention on CUDA, for which there is no kernel without score matrices.
    """
    count = parameters(shape).of_rank(policy.tensor_parallel)
    size, states = (2, 12) if policy.dtype == "bfloat16" else (4, 8)
    shards = data_parallel if policy.distributed_optimizer else 1
    held = [
        Part("weights", f"{size} P / tp", size * count),
        Part("gradients", "4 P / tp", 4 * count),
        Part("optimizer", f"{states} P / tp{' / dp' if shards > 1 else ''}", states * count / shards),
    ]
    kept = tokens * size * shape.layers * _kept(shape, policy, policy.recompute)
    kept += tokens * size * 4 * shape.hidden
    layer = tokens * size * _again(shape, policy)
    moment = max((_head(shape, policy, tokens), "the output layer"), (layer, "a layer's backward"))
    computing = [
        Part("activations", f"recompute = {policy.recompute}, T = {tokens}", kept),
        Part(f"at most: {moment[1]}", f"logprob_chunk = {policy.logprob_chunk}", moment[0]),
    ]
    stepping = 4 * count / shards
    step = Part("or then: AdamW's step", f"4 P / tp{' / dp' if shards > 1 else ''}", stepping)
    most = max(kept + moment[0], stepping)
    return LearnerMemory([*held, *computing, step], sum(part.bytes for part in held) + most)


def host_memory(shape: ModelShape, policy: Megatron, *, reference: bool) -> float:
    """Bytes that each rank pins for the KL: the reference's weights, and room for the trained ones."""
    size = 2 if policy.dtype == "bfloat16" else 4
    return 2.0 * size * parameters(shape).of_rank(policy.tensor_parallel) * reference


def kv_token(shape: ModelShape, engine: Vllm) -> int:
    """Bytes of key-value cache a token on each rank: a key and a value a layer; heads are never cut."""
    heads = math.ceil(shape.groups / engine.tensor_parallel)
    return 2 * shape.layers * heads * shape.head_dim * _engine_size(engine)


def engine_memory(shape: ModelShape, engine: Vllm, context: int) -> list[Part]:
    """Of one rank: weights, and the cache that is said or that full use would fill."""
    count, token = parameters(shape).of_rank(engine.tensor_parallel), kv_token(shape, engine)
    weights = Part("weights", f"{_engine_size(engine)} P / tp", _engine_size(engine) * count)
    if engine.kv_cache_bytes:
        tokens = engine.kv_cache_bytes // token
        full = f"{tokens:,} tokens: {tokens // context} full contexts"
        return [weights, Part("KV cache, as said", full, engine.kv_cache_bytes)]
    full = f"{engine.max_num_seqs} sequences x {context:,} tokens x {token:,} bytes"
    return [weights, Part("KV cache, if all were full", full, engine.max_num_seqs * context * token)]


def requests(config: RunConfig, slurm: Slurm) -> list[Request]:
    """What the run asks of Slurm at once."""
    found = []
    for role, jobs in desired(config).items():
        given = slurm.roles.get(role, Resources())
        processes = config.policy.tensor_parallel * config.learner.data_parallel if role == "learner" else 1
        found.append(
            Request(
                role=role,
                jobs=jobs,
                nodes=jobs * given.nodes,
                cores=jobs * processes * given.cpus_per_task,
                memory_gb=jobs * given.nodes * given.mem_gb,
                gpus=jobs * given.nodes * slurm.gpus_per_node(role),
                hours=given.timeout_min / 60,
            )
        )
    return [request for request in found if request.jobs]


def disk(config: RunConfig, shape: ModelShape | None) -> list[Part]:
    """Bytes and entries of the run folder at the run's end, and at its worst moment in between."""
    roles = desired(config)
    parts = [Part("code/, tasks", "a copy of the packages", CODE, CODE_FILES)]
    if "learner" in roles:
        parts += _states(config, shape) if shape else []
        parts.append(_batches(config))
    if "rollout" in roles:
        parts += _episodes(config)
    jobs = sum(roles.values())
    parts.append(
        Part("metrics/, tensorboard/", f"{CURVES / 1e3:.0f} kB a step", config.steps * CURVES, 2 * jobs)
    )
    parts.append(Part("nodes/, launch/, logs/", "three files a job", jobs * 5e3, 4 * jobs))
    return parts


def total(parts: Sequence[Part]) -> Part:
    """The sum."""
    return Part("all", "", sum(part.bytes for part in parts), sum(part.inodes for part in parts))


def _kept(shape: ModelShape, policy: Megatron, recompute: str) -> float:
    """Numbers a token and layer that wait for backward.

    All: the inputs of two norms and of the two products behind them, 4 h (over tp with sequence_parallel);
    attention's q, k, v as one, q by itself, q and k rotated, v rounded up, its output twice, 5 H + 4 G; the
    MLP's 3 f, or with experts the routed tokens and five inner widths, k (h + 5 f). Selective computes the
    core of attention and the MLP again, full all but the layer's input.
    """
    tp, ranks = policy.tensor_parallel, policy.tensor_parallel if policy.sequence_parallel else 1
    residual = shape.hidden / ranks
    heads, groups = shape.heads * shape.head_dim / tp, shape.groups * shape.head_dim / tp
    if recompute == "full":
        return residual
    if recompute == "selective":
        return 4 * residual + 4 * heads + 3 * groups
    inner = 3 * shape.ffn / tp
    if shape.experts:
        inner = shape.experts_per_token * (shape.hidden + 5 * shape.ffn / tp)
    return 4 * residual + 5 * heads + 4 * groups + inner


def _again(shape: ModelShape, policy: Megatron) -> float:
    """Numbers a token that one layer's backward makes: what it computes again, and the MLP's gradients."""
    gradients = 3 * shape.ffn / policy.tensor_parallel * max(1, shape.experts_per_token)
    return _kept(shape, policy, "none") - _kept(shape, policy, policy.recompute) + gradients


def _head(shape: ModelShape, policy: Megatron, tokens: int) -> float:
    """Bytes at work in _megatron/logprobs.py: copies of a chunk's logits, and a float32 weight gradient."""
    chunk, width = min(policy.logprob_chunk, tokens), shape.hidden
    copies = max(14 * chunk, 12 * chunk + 4 * width, 6 * chunk + 6 * width)
    return shape.vocab / policy.tensor_parallel * copies


def _engine_size(engine: Vllm) -> int:
    return 4 if engine.dtype == "float32" else 2


def _states(config: RunConfig, shape: ModelShape) -> list[Part]:
    """A checkpoint has weights and optimizer; of float32 weights a second copy, when it is distributed."""
    policy, learner, kept = config.policy, config.learner, config.retention
    assert isinstance(policy, Megatron)
    count, ranks = parameters(shape).total, policy.tensor_parallel * learner.data_parallel
    size, state = (2, 14) if policy.dtype == "bfloat16" else (4, 16 if policy.distributed_optimizer else 12)
    milestones = partial(_milestones, config.steps, kept.keep_every)
    versions = kept.keep_last + 1 + milestones(learner.export_every)
    saved = 2 + 1 + milestones(learner.checkpoint_every)
    return [
        Part(
            "weights/",
            f"{_kept_words(kept.keep_last, versions)} x {size} P",
            versions * (size * count + COMPANIONS),
            versions * (ranks + COMPANION_FILES + 3),
        ),
        Part(
            "checkpoints/",
            f"{_kept_words(2, saved)} x {state} P",
            float(saved * state * count),
            saved * (2 * ranks + 5),
        ),
    ]


def _kept_words(last: int, total: int) -> str:
    more = f" + {total - last - 1} kept" if total > last + 1 else ""
    return f"({last} + 1 being written{more})"


def _milestones(steps: int, keep_every: int, made_every: int) -> int:
    return steps // math.lcm(keep_every, made_every) if keep_every else 0


def _batches(config: RunConfig) -> Part:
    """From the older of two checkpoints to the newest, and what lies ahead of the learner."""
    samples = config.groups.groups_per_step * config.groups.group_size
    samples = config.sft.samples_per_step if config.mode == "sft" else samples
    kept = min(config.steps, 2 * config.learner.checkpoint_every + AHEAD[config.mode] + 1)
    tokens = samples * config.rollout.context
    return Part(
        "batches/",
        f"{kept} x {tokens:,} tokens x {BATCH_TOKEN} bytes",
        float(kept * tokens * BATCH_TOKEN),
        kept * (config.learner.data_parallel + 2),
    )


def _episodes(config: RunConfig) -> list[Part]:
    """What passes through the spools, and what is kept of it."""
    size, groups, steps = config.rollout.context * EPISODE_TOKEN, config.groups, config.steps
    step = groups.groups_per_step * groups.group_size
    flying = step * (groups.max_staleness + 1)
    if config.mode == "eval":
        flying = min(evaluation.OUTSTANDING, _evaluated(config))
        return [
            Part("spools, at most", f"{flying} messages", float(flying * size), flying),
            _tables(config, 1),
        ]
    return [
        Part("archive/", f"{steps} x {step} episodes, before zstd", float(steps * step * size), steps),
        Part("spools, at most", f"{flying} messages, if all have signal", float(flying * size), flying),
        Part("logs/", f"{LINE} bytes an episode", float(steps * step * LINE)),
        _tables(config, steps // config.eval.every if config.eval.every else 0),
    ]


def _evaluated(config: RunConfig) -> int:
    tasks = min(config.eval.tasks or config.tasks.eval, config.tasks.eval)
    return tasks * config.eval.samples * len(config.eval.decodings)


def _tables(config: RunConfig, rounds: int) -> Part:
    rows = _evaluated(config)
    size = config.rollout.context * EPISODE_TOKEN
    return Part("evals/", f"{rounds} x {rows} episodes, before zstd", float(rounds * rows * size), rounds)
