"""Keep the ledger: which members of which groups are requested, scored, or given up.

The ledger is in memory only. After a restart, the same requests, results and dead messages are found in the
spools again and lead to the same ledger. A group is closed when no member is open. A member is closed by its
first result that is no infrastructure failure, by its last failure, or when its message is in dead/.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from hpc_swe.base.records import Episode, ExitStatus, RolloutRequest, ScoredEpisode, Split
from hpc_swe.base.store.spool import Address
from hpc_swe.roles.coordinator import dispatch
from hpc_swe.roles.coordinator.batching import samples

Key = tuple[Split, int]
"""Identifies a group by its split and number."""
NAME = re.compile(r"(eval|train)-([0-9]{6}|[1-9][0-9]{6,8})-([0-9]{2}|[1-9][0-9]{2,3})")


def parse_name(identity: str) -> tuple[Key, int] | None:
    """Return the group and the index of a message; None when the name is not one of ours."""
    parts = NAME.fullmatch(identity)
    if parts is None:
        return None
    return ("eval" if parts[1] == "eval" else "train", int(parts[2])), int(parts[3])


def failure_cause(scored: ScoredEpisode, routing_bytes: int | None = None) -> str:
    """Return why this is not a result of the policy; empty when it is one.

    `routing_bytes` are those of one token in the model that is trained; None accepts any number.
    """
    if scored.score.outcome == "infra_error" or scored.episode.exit_status == ExitStatus.INFRA_ERROR:
        return scored.episode.error or scored.score.detail or "infrastructure"
    return samples.find_flaw(scored.episode, routing_bytes)


@dataclass
class Member:
    """Track one episode of a group."""

    request: RolloutRequest
    requested_at: float
    """Time of the request on this process's clock, in seconds."""
    scored: ScoredEpisode | None = None
    """The result, or the last failure, without routing."""
    address: Address | None = None
    """Address of the message of `scored`."""
    state: Literal["open", "done", "failed"] = "open"
    queue_s: float = 0.0
    """Seconds between request and result in which no worker had it."""
    absent_since: float | None = None
    """Time of the first of the last scans that all did not find the message."""
    is_routed: bool = False
    """Whether the message of `scored` has a routing."""


@dataclass
class Group:
    """Track the episodes of one task that are sampled for one update, or for one evaluation."""

    key: Key
    members: list[Member]
    straggled: bool = False
    """True when the group was closed because its open members took too long."""

    @property
    def is_open(self) -> bool:
        """Return whether a result of a member is still expected."""
        return not self.straggled and any(member.state == "open" for member in self.members)

    @property
    def results(self) -> list[ScoredEpisode]:
        """Return the results of the policy, ordered by index."""
        return [m.scored for m in self.members if m.state == "done" and m.scored is not None]


@dataclass
class Ledger:
    """Hold all groups that no batch or table has consumed."""

    max_attempts: int
    routing_bytes: int | None = None
    """Size of a token's routing in the model that is trained; a result of another size is no result."""
    groups: dict[Key, Group] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """Number of events since the last batch, by metric."""

    def open(self, key: Key, requests: Sequence[RolloutRequest], now: float) -> None:
        """Open a group with its first requests."""
        self.groups[key] = Group(key, [Member(request, now) for request in requests])

    def record(self, address: Address, scored: ScoredEpisode, now: float) -> Literal["keep", "drop", "retry"]:
        """Enter a result, and return what to do: keep its message, drop it, or drop it and retry."""
        member = self.member(address.identity)
        if member is None or member.state == "done":
            self.counts["episodes/duplicates"] += 1
            return "drop"
        cause = failure_cause(scored, self.routing_bytes)
        attempt = scored.episode.request.attempt
        if cause:
            self.counts["episodes/infra"] += 1
            if attempt < member.request.attempt:
                return "drop"  # a late duplicate of an attempt that is already being retried
            if attempt + 1 < self.max_attempts and member.state == "open":
                member.request, member.requested_at = dispatch.retry_request(scored.episode.request), now
                return "retry"
        member.is_routed = any(turn.routing for turn in scored.episode.turns)
        kept = replace(scored, episode=samples.drop_routing(scored.episode)) if member.is_routed else scored
        member.scored, member.address, member.state = kept, address, "failed" if cause else "done"
        worked_s = scored.episode.timing.total_s + scored.score.seconds
        member.queue_s = max(0.0, now - member.requested_at - worked_s)
        return "keep"

    def close_dead(self, identities: Collection[str]) -> None:
        """Close members whose message is in dead/."""
        for identity in identities:
            member = self.member(identity)
            if member is not None and member.state == "open":
                member.state = "failed"
                self.counts["episodes/infra"] += 1

    def find_lost(self, found: Collection[str], now: float, absent_s: float) -> list[RolloutRequest]:
        """Return the requests to repeat: those of open members that no scan has found for `absent_s`.

        One scan misses a message that a worker gives back; NFS shows what others rename up to a minute late.
        """
        lost = []
        groups = [group for group in self.groups.values() if group.is_open]
        for member in [m for group in groups for m in group.members if m.state == "open"]:
            since = now if member.absent_since is None else member.absent_since
            member.absent_since = None if member.request.name in found else since
            if member.absent_since is not None and now - since >= absent_s:
                member.absent_since = None
                self.counts["episodes/absent"] += 1
                lost.append(member.request)
        return lost

    def close_stragglers(self, worked_s: Mapping[str, float], limit_s: float) -> None:
        """Close groups in which every open member has been worked on for longer than `limit_s`.

        `worked_s` contains only members that a rollout worker has now. Members in a queue or in grading are
        waited for: the episode does not decide the length of a queue, and a policy could prolong its grading.
        """
        for group in self.groups.values():
            waited = [worked_s.get(m.request.name, 0.0) for m in group.members if m.state == "open"]
            if group.is_open and min(waited) > limit_s:
                group.straggled = True
                self.counts["groups/straggled"] += 1

    def drop(self, is_consumed: Callable[[Key], bool]) -> list[Group]:
        """Remove and return the groups that a batch or table has consumed."""
        return [self.groups.pop(key) for key in list(self.groups) if is_consumed(key)]

    def member(self, identity: str) -> Member | None:
        """Return the member that a message belongs to; None when its group is not in the ledger."""
        place = parse_name(identity)
        group = self.groups.get(place[0]) if place else None
        return group.members[place[1]] if group and place and place[1] < len(group.members) else None


def dispatch_step(episode: Episode) -> int:
    """Return the step of the weights that sampled the first token; 0 when none was sampled."""
    return min((span.fewest_steps for turn in episode.turns[:1] for span in turn.spans[:1]), default=0)
