"""Define what crosses the spools, and the tasks: requests/, episodes/ and scored/.

A stage adds a record and changes no earlier one:
Task, RolloutRequest -> Episode(Turn...) -> ScoredEpisode(Score).
"""

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, field

from hpc_swe.base.records.base import (
    Floats,
    IdArray,
    Ids,
    Outcome,
    Record,
    Routing,
    Split,
    WeightVersion,
    id_array,
)


class TestPlan(Record, frozen=True, kw_only=True):
    """A grader judges a task by these tests; the agent never sees them."""

    __test__ = False  # pytest must not collect this class
    command: str
    """Shell command, run in the work directory of a fresh sandbox."""
    files: dict[str, str] = {}
    """Path -> text, written over the submission before the command runs."""
    fail_to_pass: list[str]
    """Test ids that the bug breaks; if a plan names no test at all, each one counts that pytest collects."""
    pass_to_pass: list[str] = []
    timeout_s: float
    extra: dict[str, str] = {}
    """Settings for this task's own grader only, for example the name of a log parser."""


class Start(Record, frozen=True, kw_only=True):
    """A start says how the repository of an image becomes that of the task, when a sandbox is opened.

    The image holds the solution, or the hidden tests: the files that are left become the only commit.
    """

    patch: str = ""
    """Patch of the base commit that makes the fault; empty is none."""
    hidden: tuple[str, ...] = ()
    """Paths of tests that are taken away, and that a grader takes from the image. An absolute one is a folder
    beside the repository; in the repository it gets the last part of that path."""

    @property
    def inside(self) -> list[str]:
        """Return the hidden paths of the repository."""
        return [path for path in self.hidden if not path.startswith("/")]

    @property
    def names(self) -> list[str]:
        """Return where each hidden path lies in the repository while the tests are run."""
        return [path.rpartition("/")[2] if path.startswith("/") else path for path in self.hidden]


class Task(Record, frozen=True, kw_only=True):
    """A task is a problem and its tests; it names no paths of a cluster and no sampling settings."""

    task_id: str
    taskset: str
    prompt: str
    image: str
    """Name of the sandbox image, without folder or suffix."""
    workdir: str
    """Absolute path inside the sandbox."""
    base_commit: str = ""
    """Commit that the submitted diff applies to; empty when the task is plain files."""
    files: dict[str, str] = {}
    """Path -> text, written into the work directory before the agent starts."""
    absent: list[str] = []
    """Shell patterns of absolute paths that are removed from the sandbox before anybody acts in it."""
    start: Start | None = None
    """What is changed in the repository first; None is nothing."""
    tests: TestPlan


class Sampling(Record, frozen=True, kw_only=True):
    """Set the distribution that each token is sampled from."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 1 is all."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Sample from so many of the likeliest tokens; 0 is all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Leave out tokens below this share of the likeliest token's probability; 0 leaves out none."""
    max_tokens: Annotated[int, Meta(gt=0)] = 1024
    """Most tokens of one turn."""

    @property
    def is_plain(self) -> bool:
        """Return whether the recorded log-probabilities are those of the distribution sampled from."""
        return (self.temperature, self.top_p, self.top_k, self.min_p) == (1, 1, 0, 0)


class RolloutRequest(Record, frozen=True, kw_only=True):
    """A request is an order for one episode, which any rollout worker may take.

    Example: RolloutRequest(group_id=12, index=3, task_id="bugs-train-7", seed=7, sampling=Sampling())
             is spooled as requests/ready/train-000012-03~0; its episode is named train-000012-03
    """

    split: Split = "train"
    group_id: int
    """GRPO group, which siblings share. A group is trained as a whole or not at all."""
    index: int
    """Sibling index, 0 .. group_size - 1."""
    task_id: str
    seed: int
    sampling: Sampling
    attempt: int = 0
    """How many earlier attempts of this episode ended as infrastructure errors."""

    @property
    def name(self) -> str:
        """Return the episode's identity, which sorts evaluation first and then older groups first."""
        return f"{self.split}-{self.group_id:06d}-{self.index:02d}"


class VersionSpan(Record, frozen=True, kw_only=True):
    """Tokens [start, end) of a completion were sampled by weights from `oldest` to `newest`."""

    start: int
    end: int
    oldest: WeightVersion
    newest: WeightVersion

    @property
    def fewest_steps(self) -> int:
        """Return the step that staleness counts from: a learner that resumed is newer with fewer steps."""
        return min(self.oldest.step, self.newest.step)


class Turn(Record, frozen=True, kw_only=True):
    """A turn holds one completion exactly as the engine read and sampled it; nothing is ever re-tokenized.

    The prompt is the whole sequence of the parent turn (its prompt, then its completion) followed by
    `appended_ids`, so that a turn extends its parent token by token without any comparison.

    Example: P0 A0 P1 A1 is Turn(parent=None, appended_ids=P0, completion_ids=A0, ...) and
                            Turn(parent=0,    appended_ids=P1, completion_ids=A1, ...)
    """

    parent: int | None
    """Index of the turn that this one extends; None starts a chain."""
    appended_ids: Ids
    completion_ids: Ids
    logprobs: Floats
    """One per completion id, under the weights that sampled it."""
    spans: list[VersionSpan]
    """Versions of the weights; the spans cover the completion without gap or overlap."""
    sampling: Sampling
    engine: str
    finish_reason: Literal["stop", "length", "abort"]
    delivered: bool
    """Whether the reply reached the agent; an undelivered reply is never trained."""
    seconds: float
    routing: Routing = b""
    """Of the parent's last token and of this turn's tokens but the last; empty: the engine did not say."""
    tools: str = ""
    """Digest of the tools that the prompt shows; empty when it shows none."""

    @property
    def completion(self) -> IdArray:
        """Return the completion's token ids, int32 [completion]."""
        return id_array(self.completion_ids)


class ToolCall(Record, frozen=True, kw_only=True):
    """A call is what the agent parsed from the policy's text; `arguments` is JSON text, unchanged."""

    name: str
    arguments: str


class Message(Record, frozen=True, kw_only=True):
    """A chat message is shown to people and rendered into the next prompt."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: list[ToolCall] = []


class ExitStatus(StrEnum):
    """Say why an episode has ended."""

    SUBMITTED = "submitted"
    MAX_TURNS = "max_turns"
    CONTEXT = "context"
    """The next prompt would not leave room for a reply."""
    TOOL_TIME = "tool_time"
    """The tools have used up their seconds."""
    AGENT_ERROR = "agent_error"
    """The agent program failed; this counts as the policy's own work."""
    INFRA_ERROR = "infra_error"
    """The engine or the host failed; the policy is not to blame and gets no reward."""

    @property
    def is_truncated(self) -> bool:
        """Return whether a budget cut the episode off, rather than the agent ending it."""
        return self in (ExitStatus.MAX_TURNS, ExitStatus.CONTEXT, ExitStatus.TOOL_TIME)

    @property
    def is_overlong(self) -> bool:
        """Return whether its length cut the episode off. Time that its tools spend waiting is no length."""
        return self in (ExitStatus.MAX_TURNS, ExitStatus.CONTEXT)


class EngineTime(Record, frozen=True, kw_only=True):
    """The seconds between an engine's answers were spent on these."""

    prefill_s: float = 0.0
    """On forward passes that computed a prompt, or a part of one, while others sampled."""
    decode_s: float = 0.0
    """On forward passes that only sampled."""
    full_s: float = 0.0
    """Those of `decode_s` in which requests waited for room."""
    paused_s: float = 0.0
    """Loading new weights, or asleep."""
    idle_s: float = 0.0
    """Without any request."""

    def __add__(self, other: "EngineTime") -> "EngineTime":
        return EngineTime(
            prefill_s=self.prefill_s + other.prefill_s,
            decode_s=self.decode_s + other.decode_s,
            full_s=self.full_s + other.full_s,
            paused_s=self.paused_s + other.paused_s,
            idle_s=self.idle_s + other.idle_s,
        )


class EngineStages(Record, frozen=True, kw_only=True):
    """Requests to engines took these seconds in the stages of an engine, by its own clock, in total."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Those of the prompts' tokens whose keys and values the engine still had."""
    engine: EngineTime = EngineTime()
    """What the engines as wholes did since the answers before these."""

    def __add__(self, other: "EngineStages") -> "EngineStages":
        return EngineStages(
            queue_s=self.queue_s + other.queue_s,
            prefill_s=self.prefill_s + other.prefill_s,
            decode_s=self.decode_s + other.decode_s,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            engine=self.engine + other.engine,
        )


class Timing(Record, frozen=True, kw_only=True):
    """Wall seconds of one episode are summed by what they were spent on."""

    sandbox_s: float = 0.0
    engine_s: float = 0.0
    tools_s: float = 0.0
    total_s: float = 0.0
    stages: EngineStages = EngineStages()
    """What `engine_s` was spent on, as far as engines say; requests at the same time count each."""


class Episode(Record, frozen=True, kw_only=True):
    """An episode is one finished attempt, not yet scored."""

    request: RolloutRequest
    turns: list[Turn]
    messages: list[Message]
    exit_status: ExitStatus
    submission: str
    """Unified diff against the task's files; empty when nothing was changed."""
    timing: Timing
    worker: str
    error: str = ""
    """What failed, when the exit status is an error."""
    counts: dict[str, int] = {}
    """What the recorder counted, for example ``ignored_settings``."""
    main: int = -1
    """Index of the turn that starts the agent's own conversation, whose result is graded; -1 is unknown."""


class Score(Record, frozen=True, kw_only=True):
    """A score is a grader's result for one episode."""

    outcome: Outcome
    reward: float | None
    """None exactly when the outcome is ``infra_error``."""
    passed: list[str] = []
    failed: list[str] = []
    detail: str = ""
    seconds: float = 0.0
    is_final: bool = False
    """Whether all runs behind it came to their end, so that siblings with an equal patch may get it, too."""
    graded_as: str = ""
    """Name of the sibling whose equal patch was graded; empty if this episode's own patch was."""

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.outcome == "infra_error"):
            raise ValueError(f"outcome {self.outcome} with reward {self.reward}: only infra_error has none")


class ScoredEpisode(Record, frozen=True, kw_only=True):
    """A scored episode is what reward workers hand to the coordinator."""

    episode: Episode
    score: Score
    self_checks: list[str] = field(default_factory=list, name="self_checks")
    """One entry per self-check of the grader since the worker's last result: the fault, or an empty text."""
