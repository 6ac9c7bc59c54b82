"""The run configuration: TOML files merged left to right into one frozen tree, unknown keys refused.

People write TOML; `dump` writes the merged tree, defaults filled in, as the run's run.json, and jobs
read only that. A role is given the one table it uses, never the whole.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, ValidationError

from hpc_swe import plugins
from hpc_swe.errors import ConfigError
from hpc_swe.plugins.advantages.base import Advantage
from hpc_swe.plugins.agents.base import Agent
from hpc_swe.plugins.engines.base import Engine
from hpc_swe.plugins.executors.base import Executor
from hpc_swe.plugins.graders.base import Grader
from hpc_swe.plugins.policies.base import LossConfig, OptimizerConfig, Policy
from hpc_swe.plugins.sandboxes.base import Sandboxes
from hpc_swe.plugins.tasksets.base import Taskset
from hpc_swe.records import Record, Role, Sampling, Split, Task

Positive = Annotated[int, Meta(gt=0)]
Natural = Annotated[int, Meta(ge=0)]
Duration = Annotated[float, Meta(gt=0)]
FAMILIES: dict[Any, str] = {
    Advantage: "advantages",
    Agent: "agents",
    Engine: "engines",
    Executor: "executors",
    Grader: "graders",
    Policy: "policies",
    Sandboxes: "sandboxes",
    Taskset: "tasksets",
}
MAY_CHANGE = ("steps", "counts", "executor", "inference", "coordinator.poll_s", "rollout.slots", "reward")
"""Keys that a running run may see changed; all else would change what is trained."""


class TasksConfig(Record, frozen=True, kw_only=True):
    """Which tasks the run takes from its taskset, once, at the start."""

    train: Natural = 1024
    """Training tasks; groups go round and round over them in shuffled order."""
    eval: Natural = 64
    """Held-out tasks."""
    eval_from: Natural = 0
    """First held-out task, so that choosing and reporting can use different ones."""

    def take(self, taskset: Taskset) -> dict[Split, list[Task]]:
        """As many as there are of them, at the most."""
        return {
            "train": list(islice(taskset.load("train"), self.train)),
            "eval": list(islice(taskset.load("eval"), self.eval_from, self.eval_from + self.eval)),
        }


class GroupsConfig(Record, frozen=True, kw_only=True):
    """Groups, how far sampling may run ahead, and what becomes of what went wrong."""

    group_size: Annotated[int, Meta(ge=1)] = 8
    """Episodes per task (the G of GRPO)."""
    groups_per_step: Positive = 8
    """Groups with signal that one batch trains."""
    max_staleness: Natural = 1
    """Batches that may be sampled ahead of the newest exported weights."""
    hard_max_staleness: Natural = 0
    """Groups with a token older than this are dropped and counted; 0 is never."""
    max_token_staleness: Natural = 0
    """Tokens older than this are masked one by one; 0 is never."""
    straggler_s: Duration = 7200.0
    """After this a group trains with the members it has, if two, else it is dropped."""
    max_attempts: Positive = 3
    """Infrastructure failures of one episode before its member is closed without reward."""
    max_losses: Positive = 10
    """Lost leases of one message before it is buried."""
    resample: bool = True
    """Filter groups without signal; off trains them, with advantage 0."""


class BatchesConfig(Record, frozen=True, kw_only=True):
    """How episodes become microbatches."""

    aggregate: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = "token_mean"
    constant_length: Positive = 1024
    """The denominator per episode of ``constant``, in tokens."""
    overlong: Literal["train", "mask_loss", "drop_from_baseline"] = "train"
    """What a truncated episode counts for: all; the baseline, but no loss; nothing."""
    train_chains: Literal["main", "all"] = "main"
    """Whether an agent's side conversations are trained."""
    microbatch_tokens: Positive = 4096
    """Most tokens of one forward; longer samples are refused."""


class RetentionConfig(Record, frozen=True, kw_only=True):
    """What is kept on disk."""

    keep_last: Annotated[int, Meta(ge=2)] = 3
    keep_every: Natural = 0
    """Versions and checkpoints at multiples of this many steps stay; 0 is none."""
    free_space_floor_gb: Annotated[float, Meta(ge=0)] = 0.2
    """Below this dispatching stops, and says so."""


class CoordinatorConfig(Record, frozen=True, kw_only=True):
    """The coordinator's rounds."""

    poll_s: Duration = 1.0
    status_s: Duration = 5.0
    wait_s: Duration = 3600.0
    """Longest wait without progress before the coordinator says so and fails."""


class RolloutConfig(Record, frozen=True, kw_only=True):
    """How episodes are made."""

    slots: Positive = 8
    """Episodes that one worker runs at once."""
    poll_s: Duration = 0.5
    episode_timeout_s: Duration = 3600.0
    """Backstop on one episode's wall clock, waiting for the engine apart; an infrastructure failure."""
    engine_wait_s: Duration = 600.0
    """Longest wait for an engine that serves."""
    context: Positive = 4096
    """Most tokens of prompt and completion."""
    min_tokens: Positive = 16
    """With less room than this left, the episode ends as ``context``."""
    tool_parser: Literal["hermes", "qwen3_coder"] = "hermes"
    template_arguments: dict[str, bool] = {}
    """Passed to the chat template, for example enable_thinking."""
    history: Literal["keep", "template"] = "keep"
    """template: every prompt is rendered afresh, as served models see it, and begins a chain of its own."""


class RewardConfig(Record, frozen=True, kw_only=True):
    """How episodes are graded."""

    slots: Positive = 2
    poll_s: Duration = 0.5
    sentinel_every: Natural = 100
    """After one in so many gradings the grader is tried, by the reference or by nothing; 0 is never."""


class InferenceConfig(Record, frozen=True, kw_only=True):
    """How engines are kept alive."""

    url: str = ""
    """An engine that somebody else runs, for example http://host:8000; empty starts our own. Its key is in
    the environment of `launch start`, as VLLM_API_KEY."""
    port: Natural = 0
    """0 is any free port."""
    start_timeout_s: Duration = 600.0
    """Longest wait for an engine's health, at its start and when it was lost."""
    max_restarts: Natural = 5
    poll_s: Duration = 0.5


class LearnerConfig(Record, frozen=True, kw_only=True):
    """The learner's rhythm."""

    data_parallel: Positive = 1
    export_every: Positive = 1
    checkpoint_every: Positive = 10
    batch_wait_s: Duration = 3600.0
    """Longest wait for the next batch."""
    poll_s: Duration = 0.2
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()


class EvalConfig(Record, frozen=True, kw_only=True):
    """Held-out evaluation."""

    every: Natural = 0
    """Evaluate in training every so many steps; 0 is never."""
    samples: Positive = 4
    """Episodes a task and decoding."""
    tasks: Natural = 0
    """Held-out tasks used; 0 is all."""
    decodings: dict[str, Sampling] = {}
    """Label -> settings, for example greedy = {temperature = 0}."""


class SftConfig(Record, frozen=True, kw_only=True):
    """Where a warm start's samples come from."""

    source: Literal["demonstrations", "episodes"] = "demonstrations"
    episodes: str = ""
    """Run folder whose archived episodes are trained, when the source is episodes."""
    min_reward: float = 1.0
    """Least reward of an episode that is trained."""
    samples_per_step: Positive = 32


class LeaseConfig(Record, frozen=True, kw_only=True):
    """How long the dead count as living."""

    beat_s: Duration = 30.0
    ttl_s: Duration = 120.0


class RunConfig(Record, frozen=True, kw_only=True):
    """The whole of one run."""

    mode: Literal["grpo", "sft", "eval"] = "grpo"
    model: str
    """Hugging Face folder of the initial weights."""
    reference: str = ""
    """Folder of the reference model of the KL; empty is `model`."""
    seed: Natural = 0
    steps: Natural = 100
    """Optimizer steps in all."""
    counts: dict[Role, Natural] = {}
    """Jobs of each role; one where not named."""
    max_restarts: Natural = 5
    """Times that a job starts its process again."""
    tasks: TasksConfig = TasksConfig()
    taskset: Taskset
    sandbox: Sandboxes
    agent: Agent
    grader: Grader
    advantage: Advantage
    engine: Engine
    policy: Policy
    executor: Executor
    sampling: Sampling = Sampling()
    groups: GroupsConfig = GroupsConfig()
    batches: BatchesConfig = BatchesConfig()
    retention: RetentionConfig = RetentionConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    inference: InferenceConfig = InferenceConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    sft: SftConfig = SftConfig()
    lease: LeaseConfig = LeaseConfig()


def read(*paths: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Merge TOML files left to right, then one-line TOML overrides; the last wins.

    Raises:
        ConfigError: A file is missing or no TOML, a key is unknown, a value is out of bounds, or two
            values do not go together; the message names the file and the key.
    """
    tree: dict[str, Any] = {}
    for part in (*map(_parse, paths), *map(_parse_override, overrides)):
        _merge(tree, part)
    return build(tree, " + ".join(map(str, paths)))


def of_words(words: Sequence[str]) -> RunConfig:
    """`read`, as command lines have it: overrides are the words with an equals sign, files the others."""
    files = [Path(word) for word in words if "=" not in word]
    return read(*files, overrides=[word for word in words if "=" in word])


def build(tree: dict[str, Any], source: str) -> RunConfig:
    """The configuration that a merged tree describes, checked.

    Raises:
        ConfigError: As `read`.
    """
    try:
        config = msgspec.convert(tree, RunConfig, dec_hook=_plugin)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{source}: {error}{_hint(str(error))}") from None
    for complaint in _complaints(config):
        raise ConfigError(f"{source}: {complaint}")
    return config


def dump(config: RunConfig) -> dict[str, Any]:
    """The tree that `build` turns into this configuration, every default written out."""
    return {
        name: msgspec.to_builtins(plugins.dump(value) if isinstance(value, plugins.Plugin) else value)
        for name, value in msgspec.structs.asdict(config).items()
    }


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Keys that differ and may not change in a run that exists, as ``key: old -> new``."""
    left, right = dict(_leaves(dump(old))), dict(_leaves(dump(new)))
    return [
        f"{key}: {left.get(key)!r} -> {right.get(key)!r}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key) and not key.startswith(MAY_CHANGE)
    ]


def _complaints(config: RunConfig) -> list[str]:
    groups, learner, lease = config.groups, config.learner, config.lease
    rules = [
        (
            config.mode == "grpo" and not config.sampling.is_plain,
            "[sampling] training samples the plain distribution: temperature = 1, top_p = 1, top_k = 0, "
            "min_p = 0; put other settings under [eval.decodings]",
        ),
        (
            config.mode == "grpo" and groups.max_staleness < learner.export_every - 1,
            f"groups.max_staleness = {groups.max_staleness} never lets a batch be sampled while "
            f"learner.export_every = {learner.export_every}; it must be at least export_every - 1",
        ),
        (
            (config.mode, config.rollout.history, config.batches.train_chains)
            == ("grpo", "template", "main"),
            'rollout.history = "template" makes each turn its own chain; set batches.train_chains = "all"',
        ),
        (config.mode == "grpo" and groups.group_size < 2, "groups.group_size = 1 has no baseline; 2 has one"),
        (
            config.mode == "eval" and not config.eval.decodings,
            "[eval.decodings] is empty; add for example greedy = {temperature = 0.0}",
        ),
        (
            (config.mode == "sft") != (learner.loss.objective == "sft"),
            f"learner.loss.objective = {learner.loss.objective!r} does not go with mode = {config.mode!r}; "
            "the objective sft belongs to the mode sft, and only there",
        ),
        (
            config.rollout.context > config.batches.microbatch_tokens,
            f"batches.microbatch_tokens = {config.batches.microbatch_tokens} cannot hold an episode of "
            f"rollout.context = {config.rollout.context} tokens",
        ),
        (
            config.rollout.context > config.engine.max_model_len,
            f"rollout.context = {config.rollout.context} is over engine.max_model_len = "
            f"{config.engine.max_model_len}: a full context would count as the engine's failure",
        ),
        (
            bool(config.inference.url) and not re.fullmatch(r"http://[^/@\s]+", config.inference.url),
            f"inference.url = {config.inference.url!r} must be http://host:port and nothing else; "
            "an engine's key goes into the environment variable VLLM_API_KEY",
        ),
        (
            config.agent.budget_s >= config.rollout.episode_timeout_s,
            f"rollout.episode_timeout_s = {config.rollout.episode_timeout_s} is not over the agent's budget, "
            f"{config.agent.budget_s} s: a policy that idles would count as a failure of the host",
        ),
        (lease.ttl_s < 2 * lease.beat_s, f"lease.ttl_s = {lease.ttl_s} is not twice lease.beat_s"),
    ]
    return [complaint for wrong, complaint in rules if wrong]


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _parse_override(line: str) -> dict[str, Any]:
    key, _, value = line.partition("=")
    for text in (line, f'{key}="{value}"'):  # `model=runs/x` needs no quotes
        with suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(text)
    raise ConfigError(f"override {line!r}: write key=value, for example groups.group_size=8")


def _merge(tree: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        old = tree.get(key)
        # Another plugin keeps none of the first one's fields.
        if isinstance(value, dict) and isinstance(old, dict) and (old | value).get("type") == old.get("type"):
            _merge(old, value)
        else:
            tree[key] = value


def _plugin(kind: type, table: Any) -> Any:
    if not isinstance(table, dict):
        raise ConfigError(f"[{FAMILIES[kind]}] must be a table with a type")
    return plugins.load(FAMILIES[kind], table)


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _hint(message: str) -> str:
    """The keys that would be right, when one is unknown."""
    if "unknown field" not in message:
        return ""
    table: Any = RunConfig
    for name in message.rpartition("`$")[2].rstrip("`").split("."):
        table = table.__annotations__.get(name, table) if name else table
    return f"; known: {', '.join(table.__struct_fields__)}" if hasattr(table, "__struct_fields__") else ""
