"""Decide which requests are made, and when they may be made. Both decisions are pure functions.

Which: Groups are numbered 0, 1, 2 .. for the whole run. Everything about group g is computed from the run's
seed, g, and the task of g, which `curriculum` plans from results that a batch has published. A second
coordinator therefore writes exactly the same requests.

When: Batch n is the next `groups_per_step` groups with signal in the order of their numbers, and is ready
when every lower-numbered group is closed. So the content of a batch depends on the results, never on their
order of arrival, and short episodes get no advantage. This also predicts the batch of a group that is not
dispatched yet: closed groups count exactly, and open ones by the running share of groups with signal. A group
is dispatched once its predicted batch is at most `max_staleness` ahead of the newest exported weights. Groups
that turn out to have no signal lower the count, so their replacements are dispatched at once. When more
groups than predicted have signal, those with the highest numbers would be trained later: `decide` drops what
is older than `max_staleness` by then, so the limit holds however wrong the prediction was.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from hpc_swe.base.records import RolloutRequest, Sampling, Split

RATE_FLOOR = 0.1  # when few groups have signal, the number of groups in flight must stay bounded


def stable_hash(*parts: object) -> int:
    """Return a number of 31 bits that depends on the parts alone."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True)
class RequestPlan:
    """Determine the requests of a training group from its number and its task."""

    seed: int
    group_size: int
    sampling: Sampling

    def group(self, group_id: int, task: str) -> list[RolloutRequest]:
        """Return the requests of a group."""
        return [
            request(self.seed, "train", group_id, index, task, self.sampling)
            for index in range(self.group_size)
        ]


def request(
    seed: int, split: Split, group_id: int, index: int, task_id: str, sampling: Sampling
) -> RolloutRequest:
    """Build the first request of a member."""
    own_seed = stable_hash(seed, split, group_id, index)
    return RolloutRequest(
        split=split, group_id=group_id, index=index, task_id=task_id, seed=own_seed, sampling=sampling
    )


def retry_request(failed: RolloutRequest) -> RolloutRequest:
    """Build the request after an infrastructure failure: the next attempt, with another seed."""
    attempt = failed.attempt + 1
    return msgspec.structs.replace(failed, attempt=attempt, seed=stable_hash(failed.seed, attempt))


def dispatch_end(
    first: int, has_signal: Callable[[int], bool | None], batches: int, groups_per_step: int, rate: float
) -> int:
    """Return the first group from `first` on that must not be dispatched yet.

    `has_signal` of a group is None while it is open. `batches` may be sampled now: from the next one to the
    newest exported weights plus staleness, or to the run's last. `rate` is the share of groups with signal.
    """
    # The number of groups with signal that may come before a group; 1e-6 absorbs rounding.
    room = batches * groups_per_step - 1e-6
    rate = min(1.0, max(RATE_FLOOR, rate))
    group, expected = first, 0.0
    while expected < room:
        signal = has_signal(group)
        expected += rate if signal is None else float(signal)
        group += 1
    return group
