"""What crosses a process boundary. Nothing else does.

Every record is frozen and names its units. Token arrays are little-endian bytes, int32 or float32, so that
thirty thousand tokens decode in microseconds: `ids` and `floats` pack, `id_array` and `float_array` view.

Each stage adds a record and fills in no other's fields:
Task, RolloutRequest -> Episode(Turn...) -> ScoredEpisode(Score) -> Sample -> MicroBatch -> Batch.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

Ids = Annotated[bytes, Meta(description="int32, little endian")]
Floats = Annotated[bytes, Meta(description="float32, little endian")]
Split = Literal["eval", "train"]
Role = Literal["coordinator", "rollout", "reward", "inference", "learner"]
Outcome = Literal["resolved", "unresolved", "no_submission", "cheated", "infra_error"]
IdArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


def ids(values: Iterable[int] | IdArray) -> Ids:
    """Pack token ids."""
    return np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype="<i4").tobytes()


def floats(values: Iterable[float] | FloatArray) -> Floats:
    """Pack log-probabilities, advantages or weights."""
    return np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype="<f4").tobytes()


def id_array(data: Ids) -> IdArray:
    """Read-only int32 view of packed ids, shape [tokens]."""
    return np.frombuffer(data, dtype="<i4")


def float_array(data: Floats) -> FloatArray:
    """Read-only float32 view of packed numbers, shape [tokens]."""
    return np.frombuffer(data, dtype="<f4")


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records. Each one says ``frozen, kw_only`` again: type checkers do not inherit them."""


class TestPlan(Record, frozen=True, kw_only=True):
    """How a grader judges a task; the agent never sees it."""

    __test__ = False  # pytest, this is no test class
    command: str
    """Shell line run in the work directory of a fresh sandbox."""
    files: dict[str, str] = {}
    """Path -> text, laid over the submission before the command runs."""
    fail_to_pass: list[str]
    """Test ids that the bug breaks."""
    pass_to_pass: list[str] = []
    timeout_s: float
    extra: dict[str, str] = {}
    """What only this task's own grader understands, for example a log parser's name."""


class Task(Record, frozen=True, kw_only=True):
    """One problem: "what", never "how"; no paths of a cluster, no sampling settings."""

    task_id: str
    taskset: str
    prompt: str
    image: str
    """Name of the sandbox image, without folder or suffix."""
    workdir: str
    """Absolute path inside the sandbox."""
    base_commit: str = ""
    """Commit that a submission is a difference to; empty when the task is plain files."""
    files: dict[str, str] = {}
    """Path -> text, laid into the work directory before the agent starts."""
    tests: TestPlan


class Sampling(Record, frozen=True, kw_only=True):
    """Everything that shapes the distribution a token is drawn from."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Least share of probability that the likeliest tokens keep; 1 is all."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """0 is off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Tokens below this share of the likeliest one's probability are left out; 0 is none."""
    max_tokens: Annotated[int, Meta(gt=0)] = 1024
    """Most tokens of one turn."""

    @property
    def is_plain(self) -> bool:
        """Whether the recorded log-probabilities are those of the distribution sampled from."""
        return (self.temperature, self.top_p, self.top_k, self.min_p) == (1, 1, 0, 0)


class WeightVersion(Record, frozen=True, kw_only=True, order=True):
    """Which weights: the learner's incarnation, which each of its starts takes anew, then its steps."""

    incarnation: int = 0
    step: int = 0

    @property
    def name(self) -> str:
        """Folder name in weights/ and the engine's stamp: ``v000012-i01``."""
        return f"v{self.step:06d}-i{self.incarnation:02d}"

    @classmethod
    def parse(cls, name: str) -> "WeightVersion":
        """Inverse of `name`.

        Raises:
            ValueError: The name is not a version's.
        """
        step, _, incarnation = name.removeprefix("v").partition("-i")
        if step.isdecimal() and incarnation.isdecimal():
            version = cls(step=int(step), incarnation=int(incarnation))
            if version.name == name:
                return version
        raise ValueError(f"{name!r} is not a weight version such as v000012-i01")


class RolloutRequest(Record, frozen=True, kw_only=True):
    """One attempt that some rollout worker shall make.

    Example:
        RolloutRequest(group_id=12, index=3, task_id="bugs-train-7", seed=7, sampling=Sampling())
        # spooled as requests/ready/train-000012-03~0; its episode is named train-000012-03
    """

    split: Split = "train"
    group_id: int
    """GRPO group; siblings share it. The group is the atomic unit of training."""
    index: int
    """Sibling index, 0 .. group_size - 1."""
    task_id: str
    seed: int
    sampling: Sampling
    attempt: int = 0
    """How often this episode ended as an infrastructure error before."""

    @property
    def name(self) -> str:
        """The identity: evaluation sorts first, then age."""
        return f"{self.split}-{self.group_id:06d}-{self.index:02d}"


class VersionSpan(Record, frozen=True, kw_only=True):
    """Completion tokens start .. end - 1 were sampled by weights between `oldest` and `newest`."""

    start: int
    end: int
    oldest: WeightVersion
    newest: WeightVersion

    @property
    def fewest_steps(self) -> int:
        """What staleness counts from: a learner that resumed is newer with fewer steps."""
        return min(self.oldest.step, self.newest.step)


class Turn(Record, frozen=True, kw_only=True):
    """One completion exactly as the engine saw and sampled it; nothing is ever re-tokenized.

    The prompt is the whole sequence of the parent turn (its prompt, then its completion) followed by
    `appended_ids`: that a turn extends its parent token by token holds by shape, not by comparison.

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
    """Cover the completion without gap or overlap."""
    sampling: Sampling
    engine: str
    finish_reason: Literal["stop", "length", "abort"]
    delivered: bool
    """Whether the reply reached the agent; an undelivered one is never trained."""
    seconds: float

    @property
    def completion(self) -> IdArray:
        """int32 [completion]."""
        return id_array(self.completion_ids)


class ToolCall(Record, frozen=True, kw_only=True):
    """One call as the agent read it from the policy's text; `arguments` is JSON text, as written there."""

    name: str
    arguments: str


class Message(Record, frozen=True, kw_only=True):
    """One chat message, for people and for the next prompt."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: list[ToolCall] = []


class ExitStatus(StrEnum):
    """Why an episode ended."""

    SUBMITTED = "submitted"
    MAX_TURNS = "max_turns"
    CONTEXT = "context"
    """The next prompt would not leave room to answer."""
    TOOL_TIME = "tool_time"
    """The seconds that tools may use are spent."""
    AGENT_ERROR = "agent_error"
    """The agent program broke; the policy's own doing."""
    INFRA_ERROR = "infra_error"
    """The engine or the host failed; nobody's doing, never a reward."""

    @property
    def is_truncated(self) -> bool:
        """Cut off by a budget, not ended by the agent."""
        return self in (ExitStatus.MAX_TURNS, ExitStatus.CONTEXT, ExitStatus.TOOL_TIME)


class Timing(Record, frozen=True, kw_only=True):
    """Wall seconds of one episode by what they went to."""

    sandbox_s: float = 0.0
    engine_s: float = 0.0
    tools_s: float = 0.0
    total_s: float = 0.0


class Episode(Record, frozen=True, kw_only=True):
    """One finished attempt, not yet scored."""

    request: RolloutRequest
    turns: list[Turn]
    messages: list[Message]
    exit_status: ExitStatus
    submission: str
    """Unified diff against the task's files; empty when nothing was changed."""
    timing: Timing
    worker: str
    error: str = ""
    """What broke, when the exit status is an error."""
    counts: dict[str, int] = {}
    """Recorder's tallies, for example ``ignored_settings``."""
    main: int = -1
    """Index of the turn that starts the agent's own conversation, whose work is graded; -1 is not known."""


class Score(Record, frozen=True, kw_only=True):
    """What a grader says of one episode."""

    outcome: Outcome
    reward: float | None
    """None exactly when the outcome is ``infra_error``."""
    passed: list[str] = []
    failed: list[str] = []
    detail: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.outcome == "infra_error"):
            raise ValueError(f"outcome {self.outcome} with reward {self.reward}: only infra_error has none")


class ScoredEpisode(Record, frozen=True, kw_only=True):
    """An episode and its score."""

    episode: Episode
    score: Score
    sentinels: list[str] = []
    """Sentinels that the worker graded since its last result: what was wrong with each, or nothing."""


class Sample(Record, frozen=True, kw_only=True):
    """One token sequence to train on, cut from an episode; all arrays have the length of `token_ids`.

    Example: for the episode above

        token_ids = P0 A0 P1 A1
        mask      =  0  1  0  1     1 where the engine sampled; elsewhere all numbers are 0
    """

    episode: str
    token_ids: Ids
    mask: bytes
    """uint8 [tokens], 1 where the token is trained."""
    logprobs: Floats
    """The sampler's."""
    advantages: Floats
    versions: Ids
    """Step of the oldest weights that may have sampled the token, -1 where none did."""

    def __len__(self) -> int:
        return len(self.token_ids) // 4

    @property
    def mask_array(self) -> NDArray[np.uint8]:
        """uint8 [tokens]."""
        return np.frombuffer(self.mask, dtype=np.uint8)


class MicroBatch(Record, frozen=True, kw_only=True):
    """What one forward and backward consumes: samples laid end to end.

    Position t of every array speaks of token t itself; the learner shifts by one inside each sequence.
    """

    token_ids: Ids
    mask: bytes
    logprobs: Floats
    advantages: Floats
    weights: Floats
    """Per token, the aggregation's denominator inside: the loss is the sum of weight times term."""
    sequence_lengths: list[int]

    @property
    def mask_array(self) -> NDArray[np.uint8]:
        """uint8 [tokens]."""
        return np.frombuffer(self.mask, dtype=np.uint8)


class Batch(Record, frozen=True, kw_only=True):
    """One data-parallel rank's share of one optimizer step. All ranks hold equally many microbatches."""

    step: int
    rank: int
    microbatches: list[MicroBatch]


class FileInfo(Record, frozen=True, kw_only=True):
    """One file of a published folder."""

    size: int
    sha256: str


class TensorInfo(Record, frozen=True, kw_only=True):
    """One tensor of a weight folder."""

    dtype: str
    shape: list[int]
    sha256: str


class Manifest(Record, frozen=True, kw_only=True):
    """Written last into a folder; what it lists is what the folder holds."""

    writer: str
    files: dict[str, FileInfo]


class CoordinatorState(Record, frozen=True, kw_only=True):
    """Where the coordinator stands after a batch. Everything else it reads back from the spools."""

    next_group: int = 0
    """First training group that no batch has consumed and that was not filtered or dropped."""
    signal_rate: float = 1.0
    """Running share of groups with signal, for dispatching ahead."""


class BatchManifest(Manifest, frozen=True, kw_only=True):
    """A batch's commit point."""

    step: int
    groups: list[int]
    """Trained groups, in order."""
    closed: list[int]
    """Groups that this batch closed without training them: no signal, or too few members."""
    after: CoordinatorState
    stats: dict[str, float]


class ProbeScore(Record, frozen=True, kw_only=True):
    """The learner's log-probabilities of a fixed text, for an engine to reproduce before it serves."""

    token_ids: list[int]
    logprobs: list[float]
    """Of tokens 1 .., given those before."""
    tolerance: float


class WeightManifest(Manifest, frozen=True, kw_only=True):
    """A published weight version."""

    version: WeightVersion
    tensors: dict[str, TensorInfo]
    probe: ProbeScore | None = None
    parent: WeightVersion | None = None
    """Version that a delta is against; None is a full snapshot."""


class CheckpointManifest(Manifest, frozen=True, kw_only=True):
    """A complete training checkpoint."""

    step: int
    incarnation: int
    tensor_parallel: int


class RunManifest(Record, frozen=True, kw_only=True):
    """Who made the run, in which `folder` its paths start, and by which `environment` jobs find programs."""

    protocol: int
    run_id: str
    commit: str
    model_sha256: str
    config_sha256: str
    folder: str
    environment: dict[str, str]


class Node(Record, frozen=True, kw_only=True):
    """One live process: its lease, and what it shows of itself."""

    owner: str
    role: Role
    beat: int
    host: str
    pid: int
    state: Literal["starting", "ready", "updating", "draining"] = "starting"
    url: str = ""
    """Where an engine answers."""
    versions: list[WeightVersion] = []
    """Weights in use; two while an engine changes from the first to the second."""
    reading: str = ""
    """Folder being loaded; never deleted while it is named here."""
    step: int = 0
    """Optimizer steps taken, of a learner."""
    claims: list[str] = []
    worked_s: list[float] = []
    """Seconds that each of the claims was worked on while what it needs, an engine, was there."""
    slots: int = 0
    """Episodes that a worker can run at once."""


class Endpoint(Record, frozen=True, kw_only=True):
    """An engine that rollout workers may ask."""

    owner: str
    url: str
    versions: list[WeightVersion]
    updating: bool


class EndpointTable(Record, frozen=True, kw_only=True):
    """The coordinator's list of live engines; workers read this one cell and never list nodes/."""

    beat: int
    endpoints: list[Endpoint]
    newest: WeightVersion


class RoleStatus(Record, frozen=True, kw_only=True):
    """How one role fares; `silent` are those of the living whose beat has stood still for two looks."""

    role: Role
    desired: int
    alive: int
    silent: int = 0


class StatusReport(Record, frozen=True, kw_only=True):
    """What the coordinator knows, every few seconds, for `status`."""

    beat: int
    roles: list[RoleStatus]
    spools: dict[str, dict[str, int]]
    oldest_s: dict[str, float] = {}
    """Spool -> how long the coordinator has seen its oldest message there."""
    waits_for: str
    step: int
    step_s: float = 0.0
    """Seconds a step of the learner, of late; 0 before there are two."""
    newest: WeightVersion
    recent: dict[str, list[float]]
    """Metric -> its last values, oldest first."""
    errors: list[str]


class MetricLine(Record, frozen=True, kw_only=True):
    """One line of a metrics log."""

    step: int
    time: float
    """Seconds since the epoch, for the x axis of people."""
    values: dict[str, float]
