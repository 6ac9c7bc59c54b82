"""The ledger: which members of which groups are asked for, scored, or given up.

It lives in memory only. After a restart the same requests, results and burials are found in the spools
again and lead to the same ledger. A group is closed when no member is open; a member closes by its
first result that is no infrastructure failure, by its last failure, or by a burial.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hpc_swe.records import Episode, ExitStatus, RolloutRequest, ScoredEpisode, Split
from hpc_swe.roles.coordinator import dispatch, samples
from hpc_swe.store.spool import Address

Key = tuple[Split, int]
"""A group: its split and number."""
NAME = re.compile(r"(eval|train)-([0-9]{6}|[1-9][0-9]{6,8})-([0-9]{2}|[1-9][0-9]{2,3})")
SCANS = 2  # a message on its way back from a worker can escape one listing, not two


def parse_name(identity: str) -> tuple[Key, int] | None:
    """Group and index of a message; None when it is foreign."""
    parts = NAME.fullmatch(identity)
    if parts is None:
        return None
    return ("eval" if parts[1] == "eval" else "train", int(parts[2])), int(parts[3])


def failure_cause(scored: ScoredEpisode) -> str:
    """Why this is no result of the policy; empty when it is one."""
    if scored.score.outcome == "infra_error" or scored.episode.exit_status == ExitStatus.INFRA_ERROR:
        return scored.episode.error or scored.score.detail or "infrastructure"
    return samples.find_flaw(scored.episode)


@dataclass
class Member:
    """One episode of a group."""

    request: RolloutRequest
    requested_at: float
    """When, on our own clock."""
    scored: ScoredEpisode | None = None
    """The result, or the last failure."""
    address: Address | None = None
    """Where `scored` lies."""
    state: Literal["open", "done", "failed"] = "open"
    queue_s: float = 0.0
    """Between request and result, the seconds that nobody worked on it."""
    missed_scans: int = 0


@dataclass
class Group:
    """The episodes of one task sampled for one update, or for one evaluation."""

    key: Key
    members: list[Member]
    straggled: bool = False
    """Closed by the clocks of its open members."""

    @property
    def is_open(self) -> bool:
        """Whether a member may still come."""
        return not self.straggled and any(member.state == "open" for member in self.members)

    @property
    def results(self) -> list[ScoredEpisode]:
        """What the policy did, by index."""
        return [m.scored for m in self.members if m.state == "done" and m.scored is not None]


@dataclass
class Ledger:
    """All groups that no batch or table has consumed."""

    max_attempts: int
    groups: dict[Key, Group] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """Events since they were last taken."""

    def open(self, key: Key, requests: Sequence[RolloutRequest], now: float) -> None:
        """Begin to expect a group."""
        self.groups[key] = Group(key, [Member(request, now) for request in requests])

    def record(self, address: Address, scored: ScoredEpisode, now: float) -> Literal["keep", "drop", "retry"]:
        """Enter a result: keep its message, drop it, or drop it and ask again for the member."""
        member = self.member(address.identity)
        if member is None or member.state == "done":
            self.counts["episodes/duplicates"] += 1
            return "drop"
        cause, attempt = failure_cause(scored), scored.episode.request.attempt
        if cause:
            self.counts["episodes/infra"] += 1
            if attempt < member.request.attempt:
                return "drop"  # a late duplicate of an attempt that was already made again
            if attempt + 1 < self.max_attempts and member.state == "open":
                member.request, member.requested_at = dispatch.retry_request(scored.episode.request), now
                return "retry"
        member.scored, member.address, member.state = scored, address, "failed" if cause else "done"
        member.queue_s = max(0.0, now - member.requested_at - worked_s(scored))
        return "keep"

    def close_dead(self, identities: Collection[str]) -> None:
        """Close members whose message lies among the dead."""
        for identity in identities:
            member = self.member(identity)
            if member is not None and member.state == "open":
                member.state = "failed"
                self.counts["episodes/infra"] += 1

    def find_lost(self, found: Collection[str]) -> list[RolloutRequest]:
        """Requests to put again: open members that two scans running found nowhere."""
        lost = []
        for member in self._open_members():
            member.missed_scans = 0 if member.request.name in found else member.missed_scans + 1
            if member.missed_scans == SCANS:
                member.missed_scans = 0
                self.counts["episodes/absent"] += 1
                lost.append(member.request)
        return lost

    def close_stragglers(self, worked_s: Mapping[str, float], limit_s: float) -> None:
        """Stop waiting for groups of which every open member is worked on for longer than `limit_s`.

        `worked_s` has only the members that a rollout worker has now. One that lies in a queue or is graded
        is waited for: a queue's length is not up to the episode, and a policy could make its grading long.
        """
        for group in self.groups.values():
            waited = [worked_s.get(m.request.name, 0.0) for m in group.members if m.state == "open"]
            if group.is_open and min(waited) > limit_s:
                group.straggled = True
                self.counts["groups/straggled"] += 1

    def drop(self, is_consumed: Callable[[Key], bool]) -> list[Group]:
        """Forget groups that a batch or table has consumed."""
        return [self.groups.pop(key) for key in list(self.groups) if is_consumed(key)]

    def member(self, identity: str) -> Member | None:
        """The member that a message is of; None when its group is not in the ledger."""
        place = parse_name(identity)
        group = self.groups.get(place[0]) if place else None
        return group.members[place[1]] if group and place and place[1] < len(group.members) else None

    def _open_members(self) -> list[Member]:
        return [m for g in self.groups.values() if g.is_open for m in g.members if m.state == "open"]


def worked_s(scored: ScoredEpisode) -> float:
    """Seconds that workers spent on a result."""
    return scored.episode.timing.total_s + scored.score.seconds


def dispatch_step(episode: Episode) -> int:
    """Step of the weights that sampled the first token; 0 when none was sampled."""
    return min((span.fewest_steps for turn in episode.turns[:1] for span in turn.spans[:1]), default=0)
