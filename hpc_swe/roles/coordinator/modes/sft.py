"""Publish batches of demonstrations or of trajectories.

consumes      a stream of samples that is the same at every start
produces      batches/step_n: samples n * size .. (n + 1) * size - 1 of the stream; where a validation is due,
              the held-out samples beside them
waits for     the learner, when AHEAD batches are published beyond its step
unblocked by  the learner's steps

Batch n is a function of the stream and n, so the only state is which batches exist.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from hpc_swe.agents.loops.base import Preface
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.metrics import Log
from hpc_swe.base.records import (
    Batch,
    BatchManifest,
    CoordinatorState,
    IdArray,
    Message,
    Sample,
    Split,
    id_array,
)
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import folders
from hpc_swe.base.store.parquet.trajectories import Trajectory
from hpc_swe.roles.coordinator.batching import batch_metrics, batches
from hpc_swe.roles.coordinator.batching.batches import BatchPlan
from hpc_swe.roles.coordinator.batching.packing import pack_minibatches, token_weights
from hpc_swe.roles.coordinator.batching.samples import build_sample
from hpc_swe.roles.coordinator.dispatch import stable_hash
from hpc_swe.roles.coordinator.snapshot import Progress, RunSnapshot, awaited_learner

AHEAD = 32
"""Number of batches that may be published beyond the learner's step."""

Encode = Callable[[Sequence[Message]], tuple[Sequence[int], Sequence[int]]]
"""Encodes a conversation as token ids and mask, exactly as the recorder would."""
T = TypeVar("T")


@dataclass(frozen=True)
class SftSchedule:
    """Set how many samples each step takes, and how they are packed."""

    steps: int
    samples_per_step: int
    microbatch_tokens: int
    data_parallel: int
    validate_every: int = 0
    """Steps between two validations; 0 is never."""
    minibatches: int = 1
    """Optimizer steps of one pass over a batch."""
    iteration_s: float = 10.0
    """Most seconds of encoding in one iteration: a coordinator that encodes for hours would look stuck."""

    def validates(self, step: int) -> bool:
        """Return whether the batch of a step carries the held-out samples; the last batch always does."""
        return self.validate_every > 0 and (step % self.validate_every == 0 or step == self.steps - 1)


class WarmStart:
    """Publish the `stream` of samples, each at most microbatch_tokens long, as batches.

    The stream yields None where its next sample is not ready yet, and counts in `fates` what it cuts or
    drops. The learner computes the loss of the `held_out` samples without training them.
    """

    def __init__(
        self,
        run: RunDir,
        stream: Iterator[Sample | None],
        schedule: SftSchedule,
        metrics_log: Log,
        held_out: Sequence[Sample] = (),
        fates: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._run, self._schedule, self._log, self._held_out = run, schedule, metrics_log, held_out
        self._fates, self._logged = fates, dict(fates)
        self.step = max(batches.published_steps(run), default=-1) + 1
        if self.step:  # the coordinator before may have died before it logged them
            metrics_log.write(self.step - 1, folders.manifest(run.batch(self.step - 1), BatchManifest).stats)
        self._stream, self._trained = stream, self.step * schedule.samples_per_step
        self._taken: list[Sample] = []

    def iterate(self, snapshot: RunSnapshot) -> Progress:
        """Publish the batches that the learner needs next, those that can be encoded in the schedule's time.

        Raise LostRace if another coordinator published the batch that this one would publish next.
        """
        batches.require_newest(self._run, self.step)
        steps = self._schedule.steps
        until = time.monotonic() + self._schedule.iteration_s
        while self.step < min(steps, snapshot.learner_step + AHEAD) and snapshot.has_room:
            if not self._take(until):
                break
            self._publish(self._taken)
            self._taken = []
        if self._fates != self._logged:  # one line for many, since a line waits for the disk
            self._logged = dict(self._fates)
            self._log.write(self.step, self._logged)
        return awaited_learner(self._run, snapshot, self.step, steps, self._log.recent)

    def _take(self, until: float) -> bool:
        """Take the next batch from the stream, until this time at most; return whether it is complete.

        After a restart the stream repeats the samples that were published, which are encoded again.
        """
        for sample in self._stream:
            if sample is not None and self._trained:
                self._trained -= 1
            elif sample is not None:
                self._taken.append(sample)
            if len(self._taken) == self._schedule.samples_per_step:
                return True
            if time.monotonic() > until:
                return False
        return True

    def _publish(self, samples: list[Sample]) -> None:
        packed = self._pack(samples, self._schedule.minibatches)
        held_out = self._pack(self._held_out, 1) if self._schedule.validates(self.step) else []
        values = batch_metrics.of_packing(packed, self._schedule.microbatch_tokens)
        plan = BatchPlan(self.step, [], [], {}, CoordinatorState())
        batches.commit(self._run, plan, packed, values, held_out)
        self._log.write(self.step, values)
        self.step += 1

    def _pack(self, samples: Sequence[Sample], minibatches: int) -> list[Batch]:
        tokens = [int(sample.mask_array.sum()) for sample in samples]
        weights, schedule = token_weights(tokens, "token_mean"), self._schedule
        weighted = [[pair] for pair in zip(samples, weights, strict=True)]
        budget, ranks = schedule.microbatch_tokens, schedule.data_parallel
        return pack_minibatches(self.step, weighted, budget, ranks, minibatches)


def with_system_prompt(
    conversations: Iterable[Sequence[Message]], preface: Preface
) -> Iterator[list[Message]]:
    """Yield demonstrations with the agent's system prompt in place of their own.

    Raise ConfigError if a demonstration calls a tool that the agent does not have.
    """
    system = [Message(role="system", content=preface.system)] if preface.system else []
    for conversation in conversations:
        called = {call.name for message in conversation for call in message.tool_calls}
        if missing := called.difference(preface.names):
            raise ConfigError(
                f"[agent] tools lack {', '.join(sorted(missing))}, which the taskset's demonstrations call; "
                f"the agent has {', '.join(preface.names)}"
            )
        yield [*system, *(message for message in conversation if message.role != "system")]


def from_conversations(
    conversations: Iterable[Sequence[Message]], encode: Encode, limit: int, fates: Counter[str]
) -> Iterator[Sample | None]:
    """Yield demonstrations as samples; one over `limit` tokens is cut after its last turn that fits.

    Yield None for one of which no turn fits. Count both kinds in `fates`.
    """
    for number, conversation in enumerate(conversations):
        ids, mask = (np.asarray(part) for part in encode(conversation))
        end = fitting_length(mask, limit)
        if end < len(ids):
            fates["sft/cut" if end else "sft/dropped"] += 1
        yield _demonstration(f"demonstration-{number:06d}", ids[:end], mask[:end]) if end else None


def of_split(trajectories: Iterable[Trajectory], split: Split) -> list[Trajectory]:
    """Return the trajectories of a split that are used, in the order of their files."""
    return [each for each in trajectories if each.split == split and each.is_used]


def as_sample(trajectory: Trajectory) -> Sample:
    """Return the sample of a trajectory, which has a loss on its answers."""
    mask = np.frombuffer(trajectory.mask, dtype=np.uint8)
    return _demonstration(trajectory.name, id_array(trajectory.token_ids), mask)


def in_passes(items: Sequence[T], seed: int, passes: int = 0) -> Iterator[T]:
    """Yield all items in each pass, whose order the seed decides; 0 passes are endless."""
    for number in range(passes) if passes else count():
        order = sorted(range(len(items)), key=lambda i: (stable_hash(seed, "sft", number, i), i))
        yield from (items[i] for i in order)


def fitting_length(mask: np.ndarray[tuple[int], np.dtype[np.integer]], limit: int) -> int:
    """Return the length of the longest prefix of at most `limit` tokens that ends with a turn.

    It is the whole length when that is at most `limit`, and 0 when no turn fits.
    """
    if len(mask) <= limit:
        return len(mask)
    ends = np.flatnonzero(np.diff(mask.astype(np.int8)) == -1) + 1
    return int(max((end for end in ends if end <= limit), default=0))


def _demonstration(name: str, ids: IdArray, mask: np.ndarray[tuple[int], np.dtype[np.integer]]) -> Sample:
    known = (np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))
    return build_sample(name, ids, known, mask != 0, 1.0)
