"""Define what crosses folders of large files: batches/, weights/ and checkpoints/.

A scored episode becomes Sample -> MicroBatch -> Batch. A manifest is the last file of its folder.
"""

import numpy as np
from numpy.typing import NDArray

from hpc_swe.base.records.base import Floats, Ids, Record, Routing, WeightVersion, floats, ids


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


FILLER = MicroBatch(
    token_ids=ids([0, 0]),
    mask=b"\0\0",
    logprobs=floats([0, 0]),
    advantages=floats([0, 0]),
    weights=floats([0, 0]),
    sequence_lengths=[2],
)
"""A rank without samples runs this, because all ranks must run the same collectives."""


class Batch(Record, frozen=True, kw_only=True):
    """A batch is one rank's share of a step; all ranks have equally many microbatches."""

    step: int
    rank: int
    microbatches: list[MicroBatch]
    minibatches: list[int] = []
    """Number of microbatches of each optimizer step, in order; empty is one step with all."""


class FileInfo(Record, frozen=True, kw_only=True):
    """Describe a file of a published folder by its size and checksum."""

    size: int
    sha256: str


class TensorInfo(Record, frozen=True, kw_only=True):
    """Describe a tensor of a weight version by its type, shape and digest (models/deltas/tensor_delta.py)."""

    dtype: str
    shape: list[int]
    digest: str = ""
    sha256: str = ""  # versions written before digests have this instead


class Manifest(Record, frozen=True, kw_only=True):
    """A manifest is written last into a folder and lists all that the folder holds."""

    writer: str
    files: dict[str, FileInfo]


class CoordinatorState(Record, frozen=True, kw_only=True):
    """Hold what the coordinator resumes from after a batch; it reads all else back from the spools."""

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
    saving_s: float = 0.0
    """Seconds that the learner took to write and to read the files."""
