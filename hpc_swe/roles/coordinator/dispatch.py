"""What is asked for, and when it may be: two pure functions.

*What.* Groups are numbered 0, 1, 2 .. for the whole run, and everything about group g is computed from
the run's seed and g. A second coordinator therefore writes the very same requests.

*When.* Batch n is the next `groups_per_step` groups with signal in the order of their numbers, and is
ready when every lower-numbered group is closed. So what a batch holds depends on what came out, never
on what came out first: short episodes get no head start. It also makes the batch of a group that is not
dispatched yet foreseeable: groups that closed count exactly, open ones by the running share of groups
with signal. A group is dispatched once its foreseen batch is at most `max_staleness` ahead of the newest
exported weights. Groups that turn out without signal lower the count, so that their replacements go
out at once, and no finished group is ever thrown away for its age.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from hpc_swe.records import RolloutRequest, Sampling, Split

RATE_FLOOR = 0.1  # a bad spell must not send out an unbounded number of groups


def stable_hash(*parts: object) -> int:
    """A number of 31 bits that depends on the parts and on nothing else."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True)
class RequestPlan:
    """Which task and seeds every training group has."""

    seed: int
    tasks: tuple[str, ...]
    group_size: int
    sampling: Sampling

    def group(self, group_id: int) -> list[RolloutRequest]:
        """The requests of a group; each pass over the tasks has its own order."""
        epoch, place = divmod(group_id, len(self.tasks))
        task = _order(self.seed, epoch, self.tasks)[place]
        return [
            request(self.seed, "train", group_id, index, (task, self.sampling))
            for index in range(self.group_size)
        ]


def request(seed: int, split: Split, group_id: int, index: int, what: tuple[str, Sampling]) -> RolloutRequest:
    """The first request of a member."""
    return RolloutRequest(
        split=split,
        group_id=group_id,
        index=index,
        task_id=what[0],
        seed=stable_hash(seed, split, group_id, index),
        sampling=what[1],
    )


def retry_request(failed: RolloutRequest) -> RolloutRequest:
    """The request after an infrastructure failure: one attempt more, another seed."""
    attempt = failed.attempt + 1
    return msgspec.structs.replace(failed, attempt=attempt, seed=stable_hash(failed.seed, attempt))


@dataclass(frozen=True)
class DispatchWindow:
    """How far dispatch may go now."""

    next_batch: int
    last_batch: int
    """The last that may be sampled for now: newest exported weights plus staleness, or the run's last."""
    groups_per_step: int
    signal_rate: float


def dispatch_end(first: int, has_signal: Callable[[int], bool | None], window: DispatchWindow) -> int:
    """The first group from `first` on that must still wait; `has_signal` is None while one is open."""
    # Groups with signal that may lie before a group; the rest is for rounding.
    room = (window.last_batch + 1 - window.next_batch) * window.groups_per_step - 1e-6
    rate = min(1.0, max(RATE_FLOOR, window.signal_rate))
    group, expected = first, 0.0
    while expected < room:
        signal = has_signal(group)
        expected += rate if signal is None else float(signal)
        group += 1
    return group


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, tasks: tuple[str, ...]) -> list[str]:
    return sorted(tasks, key=lambda task: hashlib.sha256(f"{seed}/{epoch}/{task}".encode()).digest())
