"""Define every record that crosses a process boundary; nothing else crosses one.

Every record is frozen and names its units. Token arrays are little-endian bytes, int32 or float32: `ids` and
`floats` pack them, `id_array` and `float_array` view them. A stage adds a record and changes no earlier one:
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
Routing = Annotated[bytes, Meta(description="uint8 [tokens, layers * k], the experts of each token")]
FREE = 255  # in a Routing: the learner's own router decides, as it does for all where a Routing is empty
Split = Literal["eval", "train"]
Role = Literal["coordinator", "rollout", "reward", "inference", "learner"]
Outcome = Literal["resolved", "unresolved", "no_submission", "cheated", "infra_error"]
IdArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


def ids(values: Iterable[int] | IdArray) -> Ids:
    """Pack token ids as little-endian int32."""
    return np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype="<i4").tobytes()


def floats(values: Iterable[float] | FloatArray) -> Floats:
    """Pack log-probabilities, advantages or weights as little-endian float32."""
    return np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype="<f4").tobytes()


def id_array(data: Ids) -> IdArray:
    """Return packed ids as a read-only int32 view [tokens]."""
    return np.frombuffer(data, dtype="<i4")


def float_array(data: Floats) -> FloatArray:
    """Return packed numbers as a read-only float32 view [tokens]."""
    return np.frombuffer(data, dtype="<f4")


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """This is the base of all records; each repeats ``frozen, kw_only`` for type checkers."""


class TestPlan(Record, frozen=True, kw_only=True):
    """A grader judges a task by these tests; the agent never sees them."""

    __test__ = False  # pytest must not collect this class
    command: str
    """Shell command, run in the work directory of a fresh sandbox."""
    files: dict[str, str] = {}
    """Path -> text, written over the submission before the command runs."""
    fail_to_pass: list[str]
    """Test ids that the bug breaks."""
    pass_to_pass: list[str] = []
    timeout_s: float
    extra: dict[str, str] = {}
    """Settings for this task's own grader only, for example the name of a log parser."""


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
    tests: TestPlan


class Sampling(Record, frozen=True, kw_only=True):
    """These settings shape the distribution that each token is sampled from."""

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
        """Tell whether the recorded log-probabilities are those of the distribution sampled from."""
        return (self.temperature, self.top_p, self.top_k, self.min_p) == (1, 1, 0, 0)


class WeightVersion(Record, frozen=True, kw_only=True, order=True):
    """A version is sorted by the learner's incarnation, which each start increases, then by its steps."""

    incarnation: int = 0
    step: int = 0

    @property
    def name(self) -> str:
        """Return the name of the folder in weights/, which engines report too: ``v000012-i01``."""
        return f"v{self.step:06d}-i{self.incarnation:02d}"

    @classmethod
    def parse(cls, name: str) -> "WeightVersion":
        """Parse a `name`; raise ValueError if it is not the name of a version."""
        step, _, incarnation = name.removeprefix("v").partition("-i")
        if step.isdecimal() and incarnation.isdecimal():
            version = cls(step=int(step), incarnation=int(incarnation))
            if version.name == name:
                return version
        raise ValueError(f"{name!r} is not a weight version such as v000012-i01")


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
    """An episode has ended for one of these reasons."""

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
        """Tell whether a budget cut the episode off, rather than the agent ending it."""
        return self in (ExitStatus.MAX_TURNS, ExitStatus.CONTEXT, ExitStatus.TOOL_TIME)


class Timing(Record, frozen=True, kw_only=True):
    """Wall seconds of one episode are summed by what they were spent on."""

    sandbox_s: float = 0.0
    engine_s: float = 0.0
    tools_s: float = 0.0
    total_s: float = 0.0


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

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.outcome == "infra_error"):
            raise ValueError(f"outcome {self.outcome} with reward {self.reward}: only infra_error has none")


class ScoredEpisode(Record, frozen=True, kw_only=True):
    """A scored episode is what reward workers hand to the coordinator."""

    episode: Episode
    score: Score
    sentinels: list[str] = []
    """One entry per sentinel graded since the worker's last result: the fault found, or an empty string."""


class Sample(Record, frozen=True, kw_only=True):
    """A sample is one token sequence of an episode to train on; all arrays have the length of `token_ids`.

    Example: the turns above are P0 A0 P1 A1 with mask 0 1 0 1; where it is 0, all numbers are 0
    """

    episode: str
    token_ids: Ids
    mask: bytes
    """uint8 [tokens], 1 where the token is trained."""
    logprobs: Floats
    """Of the weights that sampled the tokens."""
    advantages: Floats
    versions: Ids
    """Step of the oldest weights that may have sampled the token; -1 where no weights sampled it."""
    routing: Routing = b""

    def __len__(self) -> int:
        return len(self.token_ids) // 4

    @property
    def mask_array(self) -> NDArray[np.uint8]:
        """Return the mask, uint8 [tokens]."""
        return np.frombuffer(self.mask, dtype=np.uint8)


class MicroBatch(Record, frozen=True, kw_only=True):
    """A microbatch is what one forward and backward consumes: several samples, concatenated.

    Position t of every array is about token t itself; the learner shifts by one inside each sequence.
    """

    token_ids: Ids
    mask: bytes
    logprobs: Floats
    advantages: Floats
    weights: Floats
    """Per token, divided by the aggregation's denominator: the loss is the sum of weight times term."""
    sequence_lengths: list[int]
    routing: Routing = b""

    @property
    def mask_array(self) -> NDArray[np.uint8]:
        """Return the mask, uint8 [tokens]."""
        return np.frombuffer(self.mask, dtype=np.uint8)


class Batch(Record, frozen=True, kw_only=True):
    """A batch is one rank's share of a step; all ranks have equally many microbatches."""

    step: int
    rank: int
    microbatches: list[MicroBatch]
    minibatches: list[int] = []
    """Number of microbatches of each optimizer step, in order; empty is one step with all."""


class FileInfo(Record, frozen=True, kw_only=True):
    """A file of a published folder is described by its size and checksum."""

    size: int
    sha256: str


class TensorInfo(Record, frozen=True, kw_only=True):
    """A tensor of a weight version is described by its type, shape and digest (plugins/tensor_delta.py)."""

    dtype: str
    shape: list[int]
    digest: str = ""
    sha256: str = ""  # versions written before digests have this instead


class Manifest(Record, frozen=True, kw_only=True):
    """A manifest is written last into a folder and lists all that the folder holds."""

    writer: str
    files: dict[str, FileInfo]


class CoordinatorState(Record, frozen=True, kw_only=True):
    """The coordinator resumes from this after a batch; it reads everything else back from the spools."""

    next_group: int = 0
    """First training group that no batch has consumed and that was not filtered or dropped."""
    signal_rate: float = 1.0
    """Running share of groups with signal, which says how many groups to dispatch ahead."""


class BatchManifest(Manifest, frozen=True, kw_only=True):
    """A batch is committed when the coordinator publishes this."""

    step: int
    groups: list[int]
    """Trained groups, in order."""
    closed: list[int]
    """Groups that this batch closed without training them, for want of signal or of members."""
    after: CoordinatorState
    stats: dict[str, float]


class ProbeScore(Record, frozen=True, kw_only=True):
    """The learner's log-probabilities of a fixed text, for an engine to reproduce before it serves."""

    token_ids: list[int]
    logprobs: list[float]
    """Of tokens 1 .. n - 1, each given the tokens before it."""
    tolerance: float


class WeightManifest(Manifest, frozen=True, kw_only=True):
    """A weight version is complete when the learner publishes this."""

    version: WeightVersion
    tensors: dict[str, TensorInfo]
    probe: ProbeScore | None = None
    parent: WeightVersion | None = None  # what a delta is relative to; None is a full snapshot


class CheckpointManifest(Manifest, frozen=True, kw_only=True):
    """A training checkpoint is complete when the learner publishes this."""

    step: int
    incarnation: int
    tensor_parallel: int


class RunManifest(Record, frozen=True, kw_only=True):
    """A run is identified by this. Relative paths start in `folder`; jobs get the `environment`."""

    protocol: int
    run_id: str
    commit: str
    model_sha256: str
    config_sha256: str
    folder: str
    environment: dict[str, str]


class Node(Record, frozen=True, kw_only=True):
    """A node is one live process: its lease, and the state that it publishes."""

    owner: str
    role: Role
    beat: int
    host: str
    pid: int
    state: Literal["starting", "ready", "updating", "sleeping", "draining"] = "starting"
    url: str = ""
    """Address of an engine."""
    versions: list[WeightVersion] = []
    """Weights in use; two while an engine changes from the first to the second."""
    reading: str = ""
    """Folder being loaded, which is not deleted while it is named here."""
    step: int = 0
    """Steps that a learner has taken: batches that it has trained."""
    claims: list[str] = []
    worked_s: list[float] = []
    """Seconds of work on each claim, counted only while an engine was available."""
    slots: int = 0
    """Episodes that a worker can run at once."""
    loops: int = 0
    """Iterations of the main loop."""
    steps: list[int] = []
    """Answers of engines and opened sandboxes so far, of each claim; one that is worked on grows."""


class Endpoint(Record, frozen=True, kw_only=True):
    """Rollout workers may send requests to this engine."""

    owner: str
    url: str
    versions: list[WeightVersion]
    updating: bool
    sleeping: bool = False
    """Whether the learner has its GPUs: it keeps its requests and answers none."""


class EndpointTable(Record, frozen=True, kw_only=True):
    """All live engines are listed in this one cell, which spares workers a listing of nodes/."""

    beat: int
    endpoints: list[Endpoint]
    newest: WeightVersion


class RoleStatus(Record, frozen=True, kw_only=True):
    """A role's live processes are counted here; `silent` ones had no new heartbeat in two checks."""

    role: Role
    desired: int
    alive: int
    silent: int = 0


class StatusReport(Record, frozen=True, kw_only=True):
    """The coordinator publishes this every few seconds for `status`."""

    beat: int
    roles: list[RoleStatus]
    spools: dict[str, dict[str, int]]
    oldest_s: dict[str, float] = {}
    """Spool -> seconds that the coordinator has seen its oldest message there."""
    waits_for: str
    step: int
    step_s: float = 0.0
    """Recent seconds per step of the learner; 0 before its second step."""
    newest: WeightVersion
    recent: dict[str, list[float]]
    """Metric -> its last values, oldest first."""
    errors: list[str]


class MetricLine(Record, frozen=True, kw_only=True):
    """A metrics log is a sequence of such lines."""

    step: int
    time: float  # seconds since the epoch, for the x axis of plots
    values: dict[str, float]
