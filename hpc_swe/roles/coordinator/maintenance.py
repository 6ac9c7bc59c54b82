"""Take snapshots of the run, recover lost claims, delete what nothing needs, and publish the status.

Each iteration takes one snapshot, which lists every spool once. Spools are listed in the order in which
messages move, so a message that moves in the meantime is seen twice rather than not at all.
"""

import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from pathlib import Path

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.records import (
    Endpoint,
    EndpointTable,
    Record,
    Role,
    RoleStatus,
    StatusReport,
    WeightVersion,
)
from hpc_swe.base.rundir import SPOOLS, RunDir
from hpc_swe.base.store import atomic, folders, weights
from hpc_swe.base.store.lease import Memory, Watcher
from hpc_swe.base.store.spool import ALONE_S, STATES, WINDOW, Address, Spool
from hpc_swe.config.settings import LeaseConfig, RetentionConfig
from hpc_swe.roles.coordinator import retention
from hpc_swe.roles.coordinator.snapshot import Progress, RunSnapshot

ABSENT_BEATS = 3  # a message that no listing shows for so long is lost: 90 s by default
ORPHAN_S = 3600.0  # a temporary file whose process shows no lease is kept this long

log = logging.getLogger(__name__)


class StepTimer:
    """Measure how long the learner's steps take."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=20)

    def note(self, step: int, now: float) -> None:
        """Note how many steps the learner has taken by now."""
        if self._seen and step < self._seen[-1][0]:  # it resumed
            self._seen.clear()
        if not self._seen or step > self._seen[-1][0]:
            self._seen.append((step, now))

    @property
    def step_s(self) -> float:
        """Return the mean seconds per step over the last steps; 0 until a step was measured."""
        if len(self._seen) < 2:
            return 0.0
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        return (ended - began) / (last - first)


class Maintenance:
    """Take a snapshot in each iteration; publish and clean up when it is due."""

    def __init__(
        self,
        run: RunDir,
        kept: RetentionConfig,
        lease: LeaseConfig,
        max_losses: int,
        clock: Callable[[], float] = time.monotonic,
        own: str = "",
    ) -> None:
        """Make the maintenance of the coordinator that holds the lease `own`, if it holds one."""
        self._run, self._kept, self._lease, self._clock = run, kept, lease, clock
        self._max_losses = max_losses
        self._watcher = Watcher(run, lease.beat_s, lease.ttl_s, clock, _remembered(run), own)
        self._spools = {name: Spool(run.spool(name), Record) for name in SPOOLS}
        self._done: dict[str, float] = {}
        self._orphans: dict[Path, float] = {}
        self._since: dict[tuple[str, str], float] = {}
        """Time at which a message was first seen in a spool, by spool and name."""
        self._unread: set[tuple[str, str]] = set()
        """Messages that could not be read at the last look for those that no worker can read."""
        self._timer = StepTimer()
        self._listed: tuple[list[Endpoint], WeightVersion] | None = None
        """Engines and newest weights of the last table."""
        self._published: tuple[list[Endpoint], WeightVersion] | None = None
        """The same when the status was published last."""
        self._beat = 0

    def snapshot(self) -> RunSnapshot:
        """Read the state of the run, and return the claims of dead processes to their spools."""
        now = self._clock()
        scan = {
            name: {state: spool.addresses(state) for state in STATES} for name, spool in self._spools.items()
        }
        claimed = [address for name in SPOOLS for address in scan[name]["claimed"]]
        owners = {address.owner for address in claimed}
        self._watcher.look(owners)
        if any([self._is_lost(address) for address in claimed]):
            for name in ("requests", "episodes"):  # results are not claimed
                self._spools[name].recover(self._is_lost, self._max_losses)
        self._watcher.forget(owners)
        newest = weights.newest(self._run) or WeightVersion()
        # A look at all cells may be half a minute old, and new episodes wait until engines serve the weights.
        self._watcher.refresh(n.owner for n in self._watcher.live("inference") if n.versions != [newest])
        with atomic.storage(self._run.root):
            free = shutil.disk_usage(self._run.root).free
        has_room = free >= self._kept.free_space_floor_gb * 1e9
        absent_s = ABSENT_BEATS * self._lease.beat_s
        snapshot = RunSnapshot(now, scan, newest, self._watcher.live(), has_room, absent_s)
        held = ((name, a.identity) for name in SPOOLS for s in ("ready", "claimed") for a in scan[name][s])
        self._since = {place: self._since.get(place, now) for place in held}
        self._timer.note(snapshot.learner_step, now)
        return snapshot

    @property
    def now(self) -> float:
        """Return the time on this process's monotonic clock, in seconds."""
        return self._clock()

    def is_outdated(self, known_at: float) -> bool:
        """Return whether what was known then is older than a lease: this process may have been frozen.

        Another coordinator may have taken its place, so nothing may be deleted by what was known.
        """
        age_s = self.now - known_at
        if is_outdated := age_s > self._lease.ttl_s:
            log.warning("looking again: what is known of the run is %.0f s old", age_s)
        return is_outdated

    def list_new_weights(self, snapshot: RunSnapshot) -> None:
        """Publish the endpoints if there are newer weights than were listed, before requests for them.

        So a worker that has such a request finds that an engine with older weights may not serve it.
        """
        if self._listed is None or snapshot.newest != self._listed[1]:
            self._list(snapshot)

    def list_for_drain(self) -> bool:
        """Publish the endpoints for rollout workers that finish their episodes; return whether one lives.

        Engines still load the last weights, and a table that does not say so would keep workers waiting.
        """
        snapshot = self.snapshot()
        if not any(node.role == "rollout" for node in snapshot.nodes):
            return False
        if _listing(snapshot) != self._listed:
            self._list(snapshot)
        return True

    def publish(
        self, snapshot: RunSnapshot, progress: Progress, desired: Mapping[Role, int], status_s: float
    ) -> None:
        """Publish endpoints and status: every `status_s`, and at once when engines or the weights change."""
        due = self._is_due("status", status_s, snapshot.now)
        if not due and _listing(snapshot) == self._published:
            return
        self._list(snapshot)
        self._published = self._listed
        atomic.put(self._run.status, self._report(snapshot, progress, desired), durable=False)
        atomic.put(self._run.watch, self._watcher.memory(), durable=False)

    def _list(self, snapshot: RunSnapshot) -> None:
        self._beat += 1
        self._listed = engines, newest = _listing(snapshot)
        table = EndpointTable(beat=self._beat, endpoints=engines, newest=newest)
        atomic.put(self._run.endpoints, table, durable=False)

    def clean_up(self, snapshot: RunSnapshot, kept_steps: Set[int] = frozenset()) -> None:
        """Delete superseded folders once per beat, and files of dead processes six times an hour.

        Weights and checkpoints of `kept_steps` are not deleted.
        """
        if self._is_due("retain", self._lease.beat_s, snapshot.now):
            for folder in retention.superseded(self._run, self._kept, snapshot.nodes, kept_steps):
                if self.is_outdated(snapshot.now):  # removing the one before has taken long
                    return
                log.info("removed %s", folder.name)
                folders.remove(folder)
        if self._is_due("sweep", ORPHAN_S / 6, snapshot.now):
            self._sweep(snapshot)
        if self._is_due("dead letters", ALONE_S, snapshot.now):
            self._bury_unreadable(snapshot)

    def _bury_unreadable(self, snapshot: RunSnapshot) -> None:
        """Move a message to dead/ that has waited long for a worker, if two looks cannot read it either.

        A worker counts it as lost only when it can read others, and there may be no others. Where none of
        those that workers try can be read, a server may be away, which costs one message now and then.
        """
        before, self._unread = self._unread, set()
        for name in ("requests", "episodes"):
            spool, ready = self._spools[name], snapshot.scan[name]["ready"]
            waiting = [a for a in ready if snapshot.now - self._since[name, a.identity] >= ALONE_S][:WINDOW]
            unread = [address for address in waiting if not spool.is_readable(address)]
            self._unread |= {(name, address.identity) for address in unread}
            late = [address for address in unread if (name, address.identity) in before]
            for address in late if len(unread) < len(waiting) else late[:1]:
                spool.move_to_dead(address)

    def _is_lost(self, address: Address) -> bool:
        return self._watcher.is_dead(address.owner) or self._watcher.is_abandoned(
            address.owner, address.identity
        )

    def _is_due(self, task: str, every_s: float, now: float) -> bool:
        if now < self._done.get(task, float("-inf")) + every_s:
            return False
        self._done[task] = now
        return True

    def _sweep(self, snapshot: RunSnapshot) -> None:
        alive = {node.owner[-8:] for node in snapshot.nodes} | {atomic.identity()}
        found = [
            path for folder in retention.swept_folders(self._run) for path in retention.orphans(folder, alive)
        ]
        self._orphans = {path: self._orphans.get(path, snapshot.now) for path in found}
        for path, since in self._orphans.items():
            if snapshot.now - since >= ORPHAN_S:
                log.info("swept %s", path)
                folders.discard(path)

    def _report(self, snapshot: RunSnapshot, progress: Progress, desired: Mapping[Role, int]) -> StatusReport:
        alive = [node.role for node in snapshot.nodes]
        silent = [node.role for node in self._watcher.silent()]
        oldest: dict[str, float] = {}
        for (name, _), since in self._since.items():
            oldest[name] = max(oldest.get(name, 0.0), snapshot.now - since)
        full = "too little free space, so no request is dispatched; free some"
        troubles = {} if snapshot.has_room else {str(self._run.root): full}
        return StatusReport(
            beat=self._beat,
            roles=[
                RoleStatus(role=role, desired=count, alive=alive.count(role), silent=silent.count(role))
                for role, count in desired.items()
            ],
            spools=snapshot.depths,
            oldest_s=oldest,
            waits_for=progress.waits_for,
            step=snapshot.learner_step,
            step_s=self._timer.step_s,
            newest=snapshot.newest,
            recent=progress.recent,
            errors=progress.errors,
            troubles=troubles | {node.owner: node.trouble for node in snapshot.nodes if node.trouble},
        )


def _listing(snapshot: RunSnapshot) -> tuple[list[Endpoint], WeightVersion]:
    engines = [
        Endpoint(
            owner=n.owner,
            url=n.url,
            versions=n.versions,
            updating=n.state == "updating",
            sleeping=n.state == "sleeping",
        )
        for n in snapshot.endpoints
    ]
    return engines, snapshot.newest


def _remembered(run: RunDir) -> Memory:
    try:
        return atomic.get(run.watch, Memory)
    except (FileNotFoundError, CorruptRecord) as error:
        log.info("counting the silence of processes from zero: %s", error)
        return Memory()
