"""State the rules between several keys of a configuration; each message names the keys and a remedy.

Every configuration keeps the rules of `of_keys`, that of an existing run too. The rules of `of_new_runs` came
later: a run that was created before them, and breaks one, goes on.
"""

import re
from collections.abc import Iterator

from msgspec.structs import asdict

from hpc_swe.base import loader
from hpc_swe.cluster.executors.base import SINGLETON_ROLES
from hpc_swe.config.settings import RunConfig
from hpc_swe.models.policies.base import LossConfig

MOST_STALENESS = 8  # steps: older samples seldom teach anything
MOST_PASSES, MOST_WITH_SQUARE = 4, 9
"""Optimizer steps for a batch that old samples stand, without the square of the log-ratio and with it."""
NARROW = 0.01
"""Less than this the ratio of a sequence moves in one step of the weights only by chance."""
_URL = re.compile(r"https?://[^/@?#\s]+(/[^@?#\s]+)?")


def of_keys(config: RunConfig) -> Iterator[str]:
    """Yield a message for each rule that the configuration breaks."""
    yield from _contradictions(config)
    yield from _misplaced_bounds(config)
    if config.hybrid:
        yield from _missing_for_hybrid(config)
    yield from _exceeded_limits(config)
    yield from _unchecked_proposals(config)
    yield from _uncorrected_rounding(config)


def of_new_runs(config: RunConfig) -> Iterator[str]:
    """Yield a message for each rule of new runs that the configuration breaks."""
    yield from _unread_bounds(config.learner.loss)
    for role in SINGLETON_ROLES:
        if config.counts.get(role, 1) > 1:
            why = "; learner.data_parallel = 2 makes two copies of the model" if role == "learner" else ""
            yield f"counts.{role} = {config.counts[role]}: a run has one{why}; leave the key out"
    yield from _foreign_grader(config)
    policy, snapshot_every = config.policy, config.learner.snapshot_every
    if snapshot_every > 1 and policy.why_no_deltas:
        yield f"learner.snapshot_every = {snapshot_every} and {policy.why_no_deltas}, or snapshot_every = 1"
    if config.mode != "grpo":
        return
    yield from _shared_memory(config)
    yield from _too_old(config)
    every, export_every = config.eval.every, config.learner.export_every
    if every % export_every:
        yield (
            f"eval.every = {every} is no multiple of learner.export_every = {export_every}: the weights of "
            f"an evaluation's step would not exist; set it to {-(-every // export_every) * export_every}"
        )
    given = {key: value for key, value in _table(config.grader).items() if key.endswith("_reward")}
    lowest = config.advantage.lowest_reward
    if lower := [f"grader.{key} = {value:g}" for key, value in given.items() if value < lowest]:
        yield (
            f"[advantage] needs rewards of {lowest:g} or more, but found {' and '.join(lower)}; raise "
            "that, or use the advantage grpo"
        )


def doubts(config: RunConfig) -> Iterator[str]:
    """Yield a message for each choice of a new run that seldom goes well."""
    groups, optimizer, loss = config.groups, config.learner.optimizer, config.learner.loss
    if config.mode != "eval" and 0 < config.steps <= optimizer.warmup_steps:
        yield (
            f"learner.optimizer.warmup_steps = {optimizer.warmup_steps} is never over in steps = "
            f"{config.steps}: the full rate is not reached; lower it"
        )
    if config.mode != "grpo" or not groups.max_staleness:
        return
    most = MOST_WITH_SQUARE if loss.sampler_coefficient else MOST_PASSES
    if (passes := optimizer.epochs * optimizer.minibatches) > most:
        yield (
            f"learner.optimizer.epochs * minibatches = {passes} optimizer steps for a batch, with samples up "
            f"to {groups.max_staleness} steps older (groups.max_staleness) and "
            f"learner.loss.sampler_coefficient = {loss.sampler_coefficient:g}: no such run is known to keep "
            f"what it learns; take at most {most}, at half the rate of one, or set groups.max_staleness = 0"
        )
    clip = min(loss.sequence_clip_low, loss.sequence_clip_high)
    if loss.objective == "gspo" and clip < NARROW:
        yield (
            f"learner.loss.objective = 'gspo' clips a sequence whose mean log-ratio exceeds {clip:g}: most "
            f"of what older weights sampled; set groups.max_staleness = 0, or sequence_clip_low and "
            f"sequence_clip_high to {NARROW:g} or more"
        )


def _foreign_grader(config: RunConfig) -> Iterator[str]:
    """Yield a message if only one of taskset and grader is Harbor's; types of your own go with either."""
    tables = [loader.dump(one) for one in (config.taskset, config.grader) if isinstance(one, loader.Plugin)]
    if config.mode not in ("grpo", "eval") or len(tables) < 2:
        return
    taskset, grader = tables[0], tables[1]["type"]
    for kind in {part["type"] for part in taskset.get("parts", {}).values()} or {taskset["type"]}:
        if (kind == "harbor") != (grader == "reward_file") and ":" not in kind + grader:
            yield (
                f"taskset.type = {kind!r} does not go with grader.type = {grader!r}: harbor and reward_file "
                "belong together"
            )


def _too_old(config: RunConfig) -> Iterator[str]:
    """Yield a message if groups may be older than any that is known to have taught something."""
    if (staleness := config.groups.max_staleness) > MOST_STALENESS:
        yield (
            f"groups.max_staleness = {staleness} exceeds {MOST_STALENESS}: such old samples seldom teach "
            "anything; lower it, and learner.export_every if that asks for more"
        )


def _shared_memory(config: RunConfig) -> Iterator[str]:
    """Yield a message if the learner would fill memory of a GPU that an engine takes later."""
    policy = config.policy
    is_auto = isinstance(policy, loader.Plugin) and loader.dump(policy).get("recompute") == "auto"
    if is_auto and policy.gpus and _table(config.executor).get("share_gpus"):
        yield (
            'policy.recompute = "auto" fills the memory that is free when the learner starts, of which an '
            "engine takes a part later with executor.share_gpus = true; name that value of those whose peaks "
            "`launch start --dry-run` lists now which leaves room for the engine"
        )


def _table(value: object) -> dict[str, float]:
    """Return the numbers of a plugin's table; an object that is no plugin has none."""
    table = loader.dump(value) if isinstance(value, loader.Plugin) else {}
    return {name: number for name, number in table.items() if isinstance(number, int | float)}


def _contradictions(config: RunConfig) -> Iterator[str]:
    """Yield a message for each rule between several keys that the configuration breaks, by mode first."""
    groups, learner, is_grpo = config.groups, config.learner, config.mode == "grpo"
    chains = (config.rollout.history, config.batches.train_chains)
    if is_grpo and groups.max_staleness < learner.export_every - 1:
        yield (
            f"groups.max_staleness = {groups.max_staleness} stops sampling for ever with "
            f"learner.export_every = {learner.export_every}; set it to export_every - 1 or more"
        )
    if is_grpo and chains[0] == "template" and chains[1] != "all":
        yield 'rollout.history = "template" makes each turn its own chain; set batches.train_chains = "all"'
    if config.mode == "sft" and config.sft.trajectories and config.rollout.history == "template":
        yield 'rollout.history = "template": trajectories are trained as episodes with history = "keep" are'
    if is_grpo and groups.group_size < 2:
        yield "groups.group_size = 1 has no baseline; set it to 2 or more"
    if (config.mode == "replay") != bool(config.batches.source):
        yield 'mode = "replay" and batches.source belong together: `launch replay RUN` sets both'
    if not config.eval.attempts and config.mode == "eval":
        yield "[eval.decodings] is empty; add for example greedy = {temperature = 0.0}"
    if (config.mode == "sft") != (learner.loss.objective == "sft"):
        yield (
            f"learner.loss.objective = {learner.loss.objective!r} does not fit mode = {config.mode!r}; "
            "use the objective sft in mode sft, and only there"
        )


_OBJECTIVES = {
    "ratio_cap": ("decoupled", "cispo"),
    "sequence_clip_low": ("gspo",),
    "sequence_clip_high": ("gspo",),
    **dict.fromkeys(
        ("mask_shift", "mask_sequence", "sampler_coefficient", "kl_coefficient"),
        ("sampler_ratio", "decoupled", "gspo", "cispo"),
    ),
}
"""Key of [learner.loss] -> the objectives with which it may be set. Others are read by most objectives."""


def _unread_bounds(loss: LossConfig) -> Iterator[str]:
    """Yield a message for each key of the loss that was set although the objective does not read it."""
    given, default = asdict(loss), asdict(LossConfig())
    for key, objectives in _OBJECTIVES.items():
        if given[key] != default[key] and loss.objective not in objectives:
            yield (
                f"learner.loss.{key} = {given[key]:g} has no meaning with learner.loss.objective = "
                f"{loss.objective!r}; set it to its default, {default[key]:g}, or use "
                f"{' or '.join(objectives)}"
            )


def _missing_for_hybrid(config: RunConfig) -> Iterator[str]:
    if config.inference.url:
        yield "hybrid = true lets the learner share GPUs with engines of the run; leave inference.url empty"
    if config.engine.sleep_arguments is None:
        yield "hybrid = true needs an engine that can free its GPUs, such as [engine] type = 'vllm'"


def _misplaced_bounds(config: RunConfig) -> Iterator[str]:
    shaping, evals = config.shaping, config.eval
    if shaping.overlong_from > 0 and shaping.overlong_to <= shaping.overlong_from:
        yield (
            f"shaping.overlong_to = {shaping.overlong_to} must exceed shaping.overlong_from = "
            f"{shaping.overlong_from}"
        )
    if config.mode == "grpo" and evals.patience > 0 and not evals.every:
        yield f"eval.patience = {evals.patience} needs evaluations; set eval.every"
    if config.mode == "sft" and config.sft.holds_out and not evals.every:
        yield "eval.every = 0: sft.validation and validation_share are never used; set it, or leave them out"


def _unchecked_proposals(config: RunConfig) -> Iterator[str]:
    """Yield a message for each decoding whose distribution vLLM does not sample from proposed tokens."""
    speculation = config.engine.speculation
    for name, decoding in config.eval.decodings.items():
        if speculation and decoding.min_p:
            yield (
                f"eval.decodings.{name}.min_p = {decoding.min_p:g} does not go with engine.speculation = "
                f"{speculation!r}: vLLM refuses such requests; leave one of the two out"
            )


def _uncorrected_rounding(config: RunConfig) -> Iterator[str]:
    """Yield a message for each coarse number whose effect on every sequence the loss stops at."""
    engine, loss = config.engine, config.learner.loss
    clip = min(loss.sequence_clip_low, loss.sequence_clip_high)
    if config.mode != "grpo" or loss.objective != "gspo" or clip >= NARROW:
        return
    kinds = {"kv_cache_dtype": engine.kv_cache_dtype, "dtype": engine.dtype}
    for key, kind in kinds.items():
        if kind.startswith("fp8"):
            yield (
                f"engine.{key} = {kind!r} samples from another distribution than the learner's, and "
                f"learner.loss.objective = 'gspo' clips a sequence whose mean log-ratio exceeds {clip:g}; "
                f"use sampler_ratio, decoupled or cispo, which weigh each token by it, or set "
                f"sequence_clip_low and sequence_clip_high to {NARROW:g} or more"
            )


def _exceeded_limits(config: RunConfig) -> Iterator[str]:
    """Yield a message for each limit that another key exceeds."""
    lease, context, url = config.lease, config.rollout.context, config.inference.url
    if context > config.batches.microbatch_tokens:
        yield (
            f"batches.microbatch_tokens = {config.batches.microbatch_tokens} cannot hold an episode of "
            f"rollout.context = {context} tokens"
        )
    if url and not _URL.fullmatch(url):
        yield (
            f"inference.url = {url!r} must be http(s)://host:port, optionally with the path "
            "of a gateway; put the engine's key into the environment variable VLLM_API_KEY"
        )
    if config.agent.budget_s >= config.rollout.episode_timeout_s:
        yield (
            f"rollout.episode_timeout_s = {config.rollout.episode_timeout_s} must exceed the agent's "
            f"budget, {config.agent.budget_s} s: else an idle policy would count as a failure of the host"
        )
    if 0 < config.supervision.stuck_s < lease.ttl_s:
        yield (
            f"supervision.stuck_s = {config.supervision.stuck_s} must be 0, or at least lease.ttl_s = "
            f"{lease.ttl_s}"
        )
