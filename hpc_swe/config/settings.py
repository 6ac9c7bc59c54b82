"""Define the tables of a run's configuration: every key has a type, a default and a meaning.

`config` reads them from TOML. Each role is given only the table that it uses.
"""

from itertools import islice
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from msgspec import Meta
from msgspec.structs import asdict

from hpc_swe.agents.loops.base import Agent
from hpc_swe.agents.sandboxes.base import Sandboxes
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Record, Role, Sampling, Split, Task
from hpc_swe.base.tracking import Tracker
from hpc_swe.cluster.executors.base import Executor
from hpc_swe.models.advantages.base import Advantage
from hpc_swe.models.engines.base import Engine
from hpc_swe.models.policies.base import Kept, LossConfig, OptimizerConfig, OptimizerTable, Policy
from hpc_swe.tasks.graders.base import Grader
from hpc_swe.tasks.sets.base import Taskset

Positive = Annotated[int, Meta(gt=0)]
Natural = Annotated[int, Meta(ge=0)]
Duration = Annotated[float, Meta(gt=0)]
# Longest wait of a coordinator without progress, beyond the limit after which supervision restarts a part;
# time in which a role that is awaited has no process does not count.
WAIT_S = 3600.0
STATUS_LOOKS = 5  # looks of a coordinator from one report to the next
SPARE_S = 3600.0  # how much longer a learner waits for a batch than the coordinator may wait for others


class TasksConfig(Record, frozen=True, kw_only=True):
    """The run takes its tasks from the taskset once, when it is created."""

    train: Natural = 1024
    """Training tasks; groups repeat them in shuffled order."""
    eval: Natural = 64
    """Held-out tasks."""
    eval_from: Natural = 0
    """Index of the first held-out task, so that model selection and final report can use different ones."""

    def take(self, taskset: Taskset) -> dict[Split, list[Task]]:
        """Return the tasks of each split; fewer where the taskset has fewer.

        Raise ConfigError if two tasks have one name, by which workers would find only one of them.
        """
        train = list(islice(taskset.load("train"), self.train))
        held_out = list(islice(taskset.load("eval"), self.eval_from, self.eval_from + self.eval))
        by_id = {task.task_id: task for task in train}
        for task in held_out:
            if by_id.get(task.task_id, task) != task:
                raise ConfigError(
                    f"[taskset] a training task and another held-out task are both called {task.task_id!r}: "
                    "rename one of them"
                )
        return {"train": train, "eval": held_out}


class SamplingConfig(Record, frozen=True, kw_only=True):
    """Training samples the unchanged distribution: the loss needs the probabilities that were recorded."""

    max_tokens: Positive = 1024
    """Most tokens of one turn."""


class GroupsConfig(Record, frozen=True, kw_only=True):
    """Groups of episodes are sampled, retried and dropped by these rules."""

    group_size: Annotated[int, Meta(ge=1)] = 8
    """Episodes per task (the G of GRPO)."""
    groups_per_step: Positive = 8
    """Groups with signal in one training batch."""
    max_staleness: Natural = 1
    """Batches that may be sampled ahead of the newest exported weights. Groups with a token older than so
    many steps are dropped and counted."""
    # Infrastructure failures of one episode before its member is closed without reward.
    max_attempts: ClassVar[int] = 3
    resample: bool = True
    """Replace groups without signal by others; false trains them on their penalties alone."""


class CurriculumConfig(Record, frozen=True, kw_only=True):
    """Tasks that all or no episodes resolve are sampled less often by these rules."""

    rest: Natural = 0
    """After each group of a settled task, one whose last two groups were each resolved by all episodes or by
    none, the task is passed over so many times; 0 treats all tasks alike."""
    # A task is settled when each of its last so many groups was resolved by all its episodes, or by none;
    # groups of which a single episode came back do not count.
    settled_after: ClassVar[int] = 2


class BatchesConfig(Record, frozen=True, kw_only=True):
    """Episodes are made into microbatches by these rules."""

    aggregate: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = "token_mean"
    """How the losses of tokens are averaged: over all tokens of the batch; as a mean or a sum over each
    episode, then over episodes; or as a sum over each episode divided by 1,024."""
    overlong: Literal["train", "mask_loss", "drop_from_baseline"] = "train"
    """How an episode counts that its turns or its context cut off: fully; in the baseline but not in the
    loss; not at all. One that used up the time of its tools is always trained: a policy could wait on
    purpose."""
    train_chains: Literal["main", "tools", "all"] = "main"
    """Train the agent's main conversation only; all conversations that show its tools, for an agent that
    rewrites its history; or its side conversations too."""
    microbatch_tokens: Positive = 4096
    """Maximum tokens of one forward; longer samples are refused."""
    source: str = ""
    """Folder of the run of mode grpo whose episodes mode replay trains; `launch replay` sets it."""


class StopConfig(Record, frozen=True, kw_only=True):
    """A run of mode grpo ends early, for a reason that `status` shows, when batches in a row show a sign."""

    entropy_low: Annotated[float, Meta(ge=0)] = 0.0
    """Sign: policy/entropy is below this; 0 is off, as for all signs."""
    entropy_high: Annotated[float, Meta(ge=0)] = 0.0
    """Sign: policy/entropy is above this."""
    length_growth: Annotated[float, Meta(ge=0)] = 0.0
    """Sign: episodes/tokens is above this many times its mean over the first three batches of the run, or of
    those that this release has trained."""
    gap: Annotated[float, Meta(ge=0)] = 0.0
    """Sign: gap/k3, the divergence of the learner from the sampler, is above this."""
    all_solved: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Sign: groups/all_solved, the share of groups that all episodes resolve, is above this."""


class RetentionConfig(Record, frozen=True, kw_only=True):
    """The coordinator deletes old files by these rules."""

    keep_every: Natural = 0
    """Also keep versions and checkpoints at multiples of this many steps; 0 keeps none. Those of the step
    with the best evaluation are always kept."""
    keep_last: ClassVar[int] = 3  # newest versions of the weights
    # With less free space than this, no new episodes are dispatched, and `status` says so.
    free_space_floor_gb: ClassVar[float] = 0.2


class RolloutConfig(Record, frozen=True, kw_only=True):
    """Rollout workers are configured by these settings."""

    slots: Positive = 8
    """Episodes that one worker runs at once."""
    episode_timeout_s: Duration = 3600.0
    """Maximum wall clock of one episode, not counting waits for an engine; exceeding it is an infrastructure
    failure. When each unfinished member of a group has been worked on for four times as long, the group
    trains with its finished members if it has two, and is dropped otherwise."""
    context: Positive = 4096
    """Maximum tokens of prompt and completion together."""
    min_tokens: ClassVar[int] = 16  # with fewer tokens left the episode ends as ``context``
    tool_parser: Literal["hermes", "qwen3_coder", "llama3_json", "mistral"] = "hermes"
    """The format in which the model writes tool calls. A call of llama3_json is a whole reply."""
    template_arguments: dict[str, bool] = {}
    """Arguments of the chat template, for example enable_thinking."""
    history: Literal["keep", "template"] = "keep"
    """template: each prompt is rendered in full, as a served model would see it, and starts its own chain."""


class RewardConfig(Record, frozen=True, kw_only=True):
    """Reward workers are configured by these settings."""

    slots: Positive = 2
    """Episodes that one worker grades at once."""
    self_check_every: ClassVar[int] = 100  # gradings between two checks of the grader itself


class InferenceConfig(Record, frozen=True, kw_only=True):
    """Engines are started and supervised with these settings."""

    url: str = ""
    """Address of an engine that somebody else runs, for example http://host:8000 or https://host/v1; empty
    starts our own. `launch start` reads the engine's key from VLLM_API_KEY."""
    hang_s: ClassVar[float] = 120.0  # an engine without a sign of life for this long is killed and restarted


class LearnerConfig(Record, frozen=True, kw_only=True):
    """The learner is configured by these settings."""

    data_parallel: Positive = 1
    """Copies of the model that share every batch. Each takes `policy.tensor_parallel` processes, times
    `policy.pipeline_parallel` and `policy.context_parallel`."""
    export_every: Positive = 1
    """Steps between two versions of the weights for the engines."""
    snapshot_every: Positive = 1
    """One of so many versions is a full snapshot, and those between hold only what changed; 1 makes all full.
    Versions of evaluated steps, multiples of `retention.keep_every` and the last step are always full."""
    checkpoint_every: Positive = 10
    """Steps between two checkpoints."""
    checkpoint_s: Annotated[float, Meta(ge=0)] = 60.0
    """Save a checkpoint, too, after a step at which a kill would cost so many seconds of work, waits for
    batches not counted, and fifty times as many as the last checkpoint took; 0 is never."""
    # Batches in a row that are skipped because a gradient was not finite; one more is an error.
    max_skipped: ClassVar[int] = 3
    loss: LossConfig = LossConfig()
    optimizer: OptimizerTable = OptimizerTable()


class EvalConfig(Record, frozen=True, kw_only=True):
    """Held-out tasks are evaluated with these settings."""

    every: Natural = 0
    """Steps between two evaluations, a multiple of `learner.export_every`; 0 is never. In mode sft: steps
    between two validations, the first before step 0; one more follows the last step."""
    samples: Positive = 4
    """Episodes per task and decoding; at temperature 0, where all would be alike, there is one."""
    tasks: Natural = 0
    """Number of held-out tasks; 0 is all."""
    decodings: dict[str, Sampling] = {}
    """Label -> sampling settings, for example greedy = {temperature = 0}. The solve rate of the first one
    says which weights are best."""
    patience: Natural = 0
    """Training ends after so many evaluations in a row without a better one; 0 never ends it early."""

    @property
    def attempts(self) -> list[tuple[str, int]]:
        """Return the attempts at each task: the label of the decoding, and the number of the sample."""
        counts = {label: self.samples if each.temperature else 1 for label, each in self.decodings.items()}
        return [(label, sample) for label, count in counts.items() for sample in range(count)]


class SftConfig(Record, frozen=True, kw_only=True):
    """A run of mode sft takes its samples from this source."""

    samples_per_step: Positive = 32
    """Samples per step."""
    trajectories: list[str] = []
    """Parquet or JSONL files of conversations in chat form, as `hpc_swe.export_episodes` makes them; without
    any the taskset's demonstrations are trained."""
    epochs: Natural = 0
    """Passes over the trajectories, from which the start computes `steps`; with 0 the key `steps` counts."""
    shown: Literal["row", "agent"] = "row"
    """row: the system message and the tools' schemas are those of each row. agent: they are those that the
    agent shows to the policy in its episodes."""
    thoughts: Literal["keep", "drop"] = "keep"
    """keep: answers are trained with their thoughts, which stay in later prompts, as in episodes."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """refuse: one row that cannot be used stops the start. drop: such rows are left out and counted."""
    validation: list[str] = []
    """Files of conversations whose loss is computed, and that are never trained."""
    validation_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the trajectories' tasks that is held out instead; a row without task_id is its own task."""

    def __post_init__(self) -> None:
        """Refuse keys that contradict each other."""
        if not self.trajectories and (self.epochs or self.holds_out):
            raise ValueError("epochs and validation need trajectories; name parquet or JSONL files")
        if self.validation and self.validation_share:
            raise ValueError("validation names files, so validation_share must be 0")

    @property
    def holds_out(self) -> bool:
        """Return whether conversations are kept for validation."""
        return bool(self.validation or self.validation_share)


class ShapingConfig(Record, frozen=True, kw_only=True):
    """An episode's advantage falls by as much as its penalty exceeds the mean of its group. Which groups have
    signal, and the curves of rewards and solve rates, depend on the grader's rewards alone."""

    overlong_from: Natural = 0
    """Sampled tokens of an episode from which it is penalized; 0 penalizes none. Replies that did not reach
    the agent count neither here nor as turns."""
    overlong_to: Natural = 0
    """Sampled tokens from which the whole of `overlong_penalty` is taken; it grows linearly up to there."""
    overlong_penalty: Annotated[float, Meta(ge=0)] = 1.0
    """Largest penalty of length."""
    turn_penalty: Annotated[float, Meta(ge=0)] = 0.0
    """Penalty of a resolved episode for each of its turns."""


class LeaseConfig(Record, frozen=True, kw_only=True):
    """Processes show that they are alive by a heartbeat."""

    ttl_s: Duration = 120.0
    """Seconds without a heartbeat after which a process counts as dead. There are four in this time."""
    beats: ClassVar[int] = 4

    @property
    def beat_s(self) -> float:
        """Return the seconds between two heartbeats of a process."""
        return self.ttl_s / self.beats


class SupervisionConfig(Record, frozen=True, kw_only=True):
    """Parts of a run that are alive and make no progress are restarted by these rules."""

    stuck_s: Annotated[float, Meta(ge=0)] = 7200.0
    """A part that has work and accomplishes nothing for this long is restarted; 0 restarts none. It must be
    longer than a learner's start, step and validation, and than an engine takes to load weights. After each
    restart a learner gets this long once more. Rollout workers have at least twice their longest time-out,
    reward workers twice the longest run of tests."""


class RunConfig(Record, frozen=True, kw_only=True):
    """A run is described completely by this tree."""

    mode: Literal["grpo", "sft", "replay", "eval"] = "grpo"
    """grpo trains on rewards, sft on conversations that [sft] names, replay on the episodes of another run.
    eval only evaluates."""
    model: str
    """Hugging Face folder of the initial weights."""
    reference: str = ""
    """Hugging Face folder of the reference model of the KL term; empty is `model`."""
    seed: Natural = 0
    """Seed of the order of tasks, of demonstrations and of evaluations."""
    steps: Natural = 100
    """Training steps of the whole run, each of which trains one batch."""
    share: Literal["", "group"] = ""
    """group: the group of the run's folder may read what `status`, `show` and `report` need; empty: none."""
    tracker: Tracker = ""
    """Also send the curves to W&B (`wandb`, without the network unless WANDB_MODE says otherwise) or to
    `trackio`, into tracked/ of the run; empty: only TensorBoard. The package must be installed."""
    counts: dict[Role, Natural] = {}
    """Number of jobs per role; 1 for roles not named. A person starts those of a role with 0, by `sbatch
    sbatch/role.sbatch`."""
    hybrid: bool = False
    """With mode grpo, engines run in the learner's job, on one node, and use its GPUs in turns with it."""
    max_restarts: Natural = 5
    """How often a job restarts its process, and the job of an engine the engine; and how often stuck
    parts are restarted without a new result or step in between before the run ends."""
    poll_s: Annotated[float, Meta(gt=0, le=60)] = 0.5
    """Seconds between two looks of a process for messages, batches or weights that are new; every fifth look
    of the coordinator reports for `status`."""
    tasks: TasksConfig = TasksConfig()
    taskset: Taskset
    sandbox: Sandboxes
    agent: Agent
    grader: Grader
    advantage: Advantage
    engine: Engine
    policy: Policy
    executor: Executor
    sampling: SamplingConfig = SamplingConfig()
    groups: GroupsConfig = GroupsConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    shaping: ShapingConfig = ShapingConfig()
    batches: BatchesConfig = BatchesConfig()
    stop: StopConfig = StopConfig()
    retention: RetentionConfig = RetentionConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    inference: InferenceConfig = InferenceConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    sft: SftConfig = SftConfig()
    lease: LeaseConfig = LeaseConfig()
    supervision: SupervisionConfig = SupervisionConfig()

    @property
    def status_s(self) -> float:
        """Return the seconds between two reports for `status`."""
        return STATUS_LOOKS * self.poll_s

    @property
    def stuck_limits(self) -> dict[Role, float]:
        """Return, for each role, the seconds without progress after which it is stuck, whatever its tasks."""
        limits: dict[Role, float] = dict.fromkeys(get_args(Role), self.supervision.stuck_s)
        if self.mode != "sft":
            limits["rollout"] = max(limits["rollout"], 2 * self.rollout.episode_timeout_s)
            limits["inference"] = max(limits["inference"], 2 * self.engine.load_timeout_s)
        return limits

    @property
    def optimizer(self) -> OptimizerConfig:
        """Return what the policy needs of the optimizer's table and of the run."""
        return OptimizerConfig(**asdict(self.learner.optimizer), steps=self.steps)

    @property
    def batch_wait_s(self) -> float:
        """Return the seconds that a learner waits for a batch: longer than the coordinator awaits others."""
        return max(self.stuck_limits.values()) + WAIT_S + SPARE_S

    @property
    def kept(self) -> list[Kept]:
        """Return what the learner keeps beside its state."""
        kept: list[Kept] = ["last version"] if self.learner.snapshot_every > 1 else []
        if not self.learner.loss.kl_coefficient:
            return kept
        is_other = Path(self.reference or self.model).resolve() != Path(self.model).resolve()
        return ["other reference" if is_other else "initial model", *kept]
