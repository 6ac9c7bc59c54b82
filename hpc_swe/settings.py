"""The tables of a run's configuration: every key with its type, its default and its meaning.

`config` reads them from TOML. A role is given the one table that it uses, never the whole.
"""

from itertools import islice
from typing import Annotated, Literal

from msgspec import Meta

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
    straggler_s: Duration = 14400.0
    """When workers are at every open member of a group for longer than this, each from its claim on and while
    an engine serves, the group trains with the members it has, if two, else it is dropped."""
    max_attempts: Positive = 3
    """Infrastructure failures of one episode before its member is closed without reward."""
    max_losses: Positive = 10
    """Lost leases of one message before it is buried."""
    resample: bool = True
    """Filter groups without signal; off trains them, with advantage 0."""


class BatchesConfig(Record, frozen=True, kw_only=True):
    """How episodes become microbatches."""

    aggregate: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = "token_mean"
    """How the losses of tokens are averaged: over all tokens of the batch, over each episode first, by
    its sum, or by `constant_length`."""
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
    """Newest versions of the weights that stay."""
    keep_every: Natural = 0
    """Versions and checkpoints at multiples of this many steps stay; 0 is none."""
    free_space_floor_gb: Annotated[float, Meta(ge=0)] = 0.2
    """Below this dispatching stops, and says so."""


class CoordinatorConfig(Record, frozen=True, kw_only=True):
    """The coordinator's rounds."""

    poll_s: Duration = 1.0
    """Seconds between two rounds."""
    status_s: Duration = 5.0
    """Seconds between two reports for `status`."""
    wait_s: Duration = 3600.0
    """Longest wait without progress before the coordinator says so and fails."""


class RolloutConfig(Record, frozen=True, kw_only=True):
    """How episodes are made."""

    slots: Positive = 8
    """Episodes that one worker runs at once."""
    poll_s: Duration = 0.5
    """Seconds between two looks for requests."""
    episode_timeout_s: Duration = 3600.0
    """Backstop on one episode's wall clock, waiting for the engine apart; an infrastructure failure."""
    engine_wait_s: Duration = 600.0
    """Longest time without an engine that serves. A completion may take longer, while its engine is alive."""
    context: Positive = 4096
    """Most tokens of prompt and completion."""
    min_tokens: Positive = 16
    """With less room than this left, the episode ends as ``context``."""
    tool_parser: Literal["hermes", "qwen3_coder"] = "hermes"
    """The form in which the model writes tool calls."""
    template_arguments: dict[str, bool] = {}
    """Passed to the chat template, for example enable_thinking."""
    history: Literal["keep", "template"] = "keep"
    """template: every prompt is rendered afresh, as served models see it, and begins a chain of its own."""


class RewardConfig(Record, frozen=True, kw_only=True):
    """How episodes are graded."""

    slots: Positive = 2
    """Episodes that one worker grades at once."""
    poll_s: Duration = 0.5
    """Seconds between two looks for episodes."""
    sentinel_every: Natural = 100
    """After one in so many gradings the grader is tried, by the reference or by nothing; 0 is never."""


class InferenceConfig(Record, frozen=True, kw_only=True):
    """How engines are kept alive."""

    url: str = ""
    """An engine that somebody else runs, for example http://host:8000 or https://host/v1; empty starts our
    own. Its key is in the environment of `launch start`, as VLLM_API_KEY."""
    port: Natural = 0
    """0 is any free port."""
    start_timeout_s: Duration = 600.0
    """Longest wait for an engine's health, at its start and when it was lost."""
    hang_s: Duration = 60.0
    """An engine that gives no sign of life for so long is ended and started again."""
    max_restarts: Natural = 5
    """Times that a supervisor starts its engine again."""
    poll_s: Duration = 0.5
    """Seconds between two looks for new weights."""


class LearnerConfig(Record, frozen=True, kw_only=True):
    """The learner's rhythm."""

    data_parallel: Positive = 1
    """Groups of `policy.tensor_parallel` processes that share each batch."""
    export_every: Positive = 1
    """Steps between two versions of the weights for the engines."""
    checkpoint_every: Positive = 10
    """Steps between two checkpoints."""
    batch_wait_s: Duration = 3600.0
    """Longest wait for the next batch."""
    poll_s: Duration = 0.2
    """Seconds between two looks for the next batch."""
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
    """The taskset's demonstrations, or archived episodes of another run."""
    episodes: str = ""
    """Run folder whose archived episodes are trained, when the source is episodes."""
    min_reward: float = 1.0
    """Least reward of an episode that is trained."""
    samples_per_step: Positive = 32
    """Samples that one optimizer step trains."""


class LeaseConfig(Record, frozen=True, kw_only=True):
    """How long the dead count as living."""

    beat_s: Duration = 30.0
    """Seconds between two signs of life of a process."""
    ttl_s: Duration = 120.0
    """Seconds without one after which a process counts as dead."""


class RunConfig(Record, frozen=True, kw_only=True):
    """The whole of one run."""

    mode: Literal["grpo", "sft", "eval"] = "grpo"
    """grpo trains by rewards, sft warm-starts on demonstrations or episodes, eval only evaluates."""
    model: str
    """Hugging Face folder of the initial weights."""
    reference: str = ""
    """Folder of the reference model of the KL; empty is `model`."""
    seed: Natural = 0
    """Of the order of tasks, of demonstrations and of evaluations."""
    steps: Natural = 100
    """Optimizer steps in all."""
    counts: dict[Role, Natural] = {}
    """Jobs of each role; one where not named."""
    by_hand: list[Role] = []
    """Roles whose count may be 0 while others run: a person starts them, by `sbatch sbatch/role.sbatch`."""
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
