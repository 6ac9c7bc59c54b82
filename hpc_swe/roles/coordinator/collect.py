"""Enter results from scored/ into the ledger, and request again what failed or got lost.

consumes      scored/, read in ready/: the coordinator is its only reader, so nothing is claimed
produces      the ledger; requests/ for further attempts
waits for     nothing
unblocked by  each iteration, which reads one listing of every spool

The message of a result stays in scored/ until a batch or table that contains it is published. So scored/ is
the coordinator's memory across restarts.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Set

from hpc_swe.base.errors import StorageError
from hpc_swe.base.records import RolloutRequest, ScoredEpisode
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.spool import ALONE_S, PATIENCE_S, Address, Spool
from hpc_swe.roles.coordinator.batching import batch_metrics
from hpc_swe.roles.coordinator.batching.groups import Group, Key, Ledger, failure_cause, parse_name
from hpc_swe.roles.coordinator.snapshot import RunSnapshot
from hpc_swe.tasks.graders.base import DISAGREES, GRADER_BROKE, SILENT

WORST_TASKS = 5  # how many tasks with infrastructure failures the status names

log = logging.getLogger(__name__)


class ResultCollector:
    """Keep the ledger up to date with the spools.

    `expects` returns the requests of a group; None when the group was consumed or is not one of this run. The
    results of `unarchived` groups, which were consumed, are kept aside until `forget_leftovers`.
    """

    def __init__(
        self,
        run: RunDir,
        ledger: Ledger,
        expects: Callable[[Key], list[RolloutRequest] | None],
        unarchived: Set[Key] = frozenset(),
    ) -> None:
        self.ledger, self._unarchived = ledger, unarchived
        self._leftovers: dict[Address, ScoredEpisode] = {}
        """Results of unarchived groups that were read."""
        self._expects = expects
        self._requests = Spool(run.requests, RolloutRequest)
        self._scored = Spool(run.scored, ScoredEpisode)
        self._held: set[Address] = set()
        self._refused: dict[Address, tuple[float, int]] = {}
        """Result that the file system does not let us read -> since when, and the results read by then."""
        self._reads = 0
        self._buried_at = 0.0
        """Time at which a result was moved to dead/ last."""
        self._errors: deque[str] = deque(maxlen=5)
        self._wrong: deque[str] = deque(maxlen=1)
        """The last self-check that was graded wrongly; the status keeps it, since the grader is in doubt."""
        self._read: Counter[str] = Counter()
        """Number of results read, by task."""
        self._failed: Counter[str] = Counter()
        """Number of infrastructure failures among them, by task."""

    @property
    def errors(self) -> list[str]:
        """Return for the status: the last failures, the tasks that failed most, and a grader that errs."""
        worst = [
            f"{task} {failed} of {self._read[task]}" for task, failed in self._failed.most_common(WORST_TASKS)
        ]
        by_task = [f"infrastructure failures: {', '.join(worst)}"] if worst else []
        return [*self._errors, *by_task, *self._wrong]

    def collect(self, snapshot: RunSnapshot) -> None:
        """Enter new results, close what is dead, and request again what was lost."""
        self._adopt(snapshot)
        reads = self._reads
        for address in snapshot.scan["scored"]["ready"]:
            if address not in self._held and address not in self._leftovers and parse_name(address.identity):
                try:
                    scored = self._scored.read(address)
                except StorageError as error:
                    self._refuse(address, error, snapshot.now, reads)
                    continue
                self._refused.pop(address, None)
                if scored is not None:
                    self._reads += 1
                    self._record(address, scored, snapshot.now)
        self.ledger.close_dead({a.identity for spool in snapshot.scan.values() for a in spool["dead"]})
        for request in self.ledger.find_lost(snapshot.identities, snapshot.now, snapshot.absent_s):
            log.warning("lost %s, requested again", request.name)
            self._requests.overwrite(request.name, request)

    def request(self, key: Key, snapshot: RunSnapshot) -> None:
        """Open a group, and request its members that are not in a spool already."""
        for request in self._open(key, snapshot.now):
            if request.name not in snapshot.identities:
                self._requests.overwrite(request.name, request)

    def forget(self, groups: list[Group]) -> None:
        """Remove the messages of groups that were consumed."""
        for group in groups:
            for member in group.members:
                if member.address is not None:
                    self._drop(member.address)

    def leftovers(self, snapshot: RunSnapshot) -> list[ScoredEpisode] | None:
        """Return the results of unarchived groups; None until each was read, or is moved to dead/."""
        found = [a for a in snapshot.scan["scored"]["ready"] if self._is_leftover(a)]
        is_whole = self._leftovers.keys() >= {*found}
        return [self._leftovers[address] for address in found] if is_whole else None

    def forget_leftovers(self) -> None:
        """Remove the messages of unarchived groups, which have an archive now."""
        for address in self._leftovers:
            self._drop(address)
        self._unarchived, self._leftovers = frozenset(), {}

    def _is_leftover(self, address: Address) -> bool:
        place = parse_name(address.identity)
        return place is not None and place[0] in self._unarchived

    def _adopt(self, snapshot: RunSnapshot) -> None:
        """Open the groups that a former coordinator dispatched, and remove requests that no group needs."""
        for key in sorted({place[0] for place in map(parse_name, snapshot.identities) if place}):
            self._open(key, snapshot.now)
        for address in snapshot.scan["requests"]["ready"]:
            place = parse_name(address.identity)
            if place is not None and place[0] not in self.ledger.groups:
                self._requests.remove(address)

    def _open(self, key: Key, now: float) -> list[RolloutRequest]:
        """Open a group that is expected and not open yet; return its requests, or none otherwise."""
        requests = None if key in self.ledger.groups else self._expects(key)
        if requests is None:
            return []
        self.ledger.open(key, requests, now)
        return requests

    def _refuse(self, address: Address, error: StorageError, now: float, reads: int) -> None:
        """Leave a result for later, or move it to dead/ when others could be read for long.

        The last results of a run have no others beside them: one of these is moved after a longer time.
        """
        if address not in self._refused:
            self._refused[address] = (now, reads)
            self._errors.append(f"{address.identity}: {error}")
            log.warning("left %s for later: %s", address.identity, error)
        since, reads_before = self._refused[address]
        can_read_others = now - since > PATIENCE_S and self._reads > reads_before
        if can_read_others or now - max(since, self._buried_at) > ALONE_S:
            log.error("dead letter %s: %s", address.identity, error)
            self._scored.move_to_dead(address)
            self._buried_at = now
            del self._refused[address]

    def _record(self, address: Address, scored: ScoredEpisode, now: float) -> None:
        if self._is_leftover(address):
            self._leftovers[address] = scored
            return
        request, member = scored.episode.request, self.ledger.member(address.identity)
        wanted = member.request if member else request
        found = request.name, request.task_id, request.sampling
        if found != (address.identity, wanted.task_id, wanted.sampling):
            log.error("dropped %s: a result of %s, %s, %s", address.identity, *found)
            self._drop(address)
            return
        cause = failure_cause(scored, self.ledger.routing_bytes)
        self._count(scored, cause)
        action = self.ledger.record(address, scored, now)
        if action == "keep":
            self._held.add(address)
            return
        member = self.ledger.member(address.identity)
        if action == "retry" and member is not None:
            log.info("retry %s: %s", address.identity, cause)
            self._requests.overwrite(member.request.name, member.request)
        self._drop(address)

    def _count(self, scored: ScoredEpisode, cause: str) -> None:
        request, counts = scored.episode.request, self.ledger.counts
        turns = f"turns_{batch_metrics.turns_bin(len(scored.episode.turns))}"
        self._read[request.task_id] += 1
        counts[f"read/{turns}"] += 1
        if cause:
            self._errors.append(f"{request.name} a{request.attempt}: {cause}")
            self._failed[request.task_id] += 1
            counts[f"infra/{turns}"] += 1
        wrong = [message for message in scored.self_checks if message]
        self._wrong.extend(wrong)
        counts["grader/results"] += 1
        if scored.score.detail.startswith(GRADER_BROKE):
            self._errors.append(f"{request.name} a{request.attempt}: {scored.score.detail}")
            counts["grader/broke"] += 1
        counts["grader/disagrees"] += scored.score.detail.startswith(DISAGREES)
        counts["grader/silent"] += scored.score.detail.startswith(SILENT)
        counts["grader/self_checks"] += len(scored.self_checks)
        counts["grader/self_check_errors"] += len(wrong)

    def _drop(self, address: Address) -> None:
        self._scored.remove(address)
        self._held.discard(address)
