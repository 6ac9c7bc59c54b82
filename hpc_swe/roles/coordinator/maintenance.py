"""Take snapshots of the run, recover lost claims, delete what nothing needs, and publish the status.

Each iteration takes one snapshot, which lists every spool once. Spools are listed in the order in which
messages move, so a message that moves in the meantime is seen twice rather than not at all.
"""

import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpc_swe.errors import CorruptRecord
from hpc_swe.records import (
    Endpoint,
    EndpointTable,
    Episode,
    Node,
    Role,
    RoleStatus,
    RolloutRequest,
    StatusReport,
    WeightVersion,
)
from hpc_swe.roles.coordinator import retention
from hpc_swe.rundir import SPOOLS, RunDir
from hpc_swe.settings import LeaseConfig, RetentionConfig
from hpc_swe.store import atomic, folders, weights
from hpc_swe.store.lease import Memory, Watcher
from hpc_swe.store.spool import STATES, Address, Spool

ORPHAN_S = 3600.0  # a temporary file whose process shows no lease is kept this long

Scan = dict[str, dict[str, list[Address]]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSnapshot:
    """Hold the state of the run at one moment."""

    now: float
    """Time on this process's monotonic clock, in seconds."""
    scan: Scan
    newest: WeightVersion
    """Newest exported weights; version 0 before the first export."""
    nodes: list[Node]
    """Leases of the processes that are alive."""
    has_room: bool
    """True when the file system has more free space than the configured floor."""

    @cached_property
    def identities(self) -> set[str]:
        """Return the names of all messages in any spool, apart from those in dead/."""
        states = ("ready", "claimed")
        return {a.identity for spool in self.scan.values() for state in states for a in spool[state]}

    @cached_property
    def dead_identities(self) -> set[str]:
        """Return the names of all messages in dead/."""
        return {address.identity for spool in self.scan.values() for address in spool["dead"]}

    @property
    def engines(self) -> list[Node]:
        """Return the leases of the engines that serve."""
        serving = [n for n in self.nodes if n.role == "inference" and n.state in ("ready", "updating")]
        return [node for node in serving if node.url]

    @cached_property
    def worked_s(self) -> dict[str, float]:
        """Map the requests that a rollout worker has, and that have no result yet, to seconds of work.

        The leases of the workers report them: their clocks pause while no engine serves, and end with the
        claim.
        """
        rollout = [node for node in self.nodes if node.role == "rollout"]
        clocks = {(n.owner, c): s for n in rollout for c, s in zip(n.claims, n.worked_s, strict=False)}
        states = (("episodes", "ready"), ("episodes", "claimed"), ("scored", "ready"))
        beyond = {a.identity for spool, state in states for a in self.scan[spool][state]}
        held = {(a.owner, a.identity) for a in self.scan["requests"]["claimed"]} & clocks.keys()
        return {claim: clocks[owner, claim] for owner, claim in held if claim not in beyond}

    @property
    def learner_step(self) -> int:
        """Return the optimizer steps that the learner has taken, as far as is known."""
        return max([self.newest.step, *(node.step for node in self.nodes if node.role == "learner")])

    @property
    def slots(self) -> int:
        """Return how many episodes all rollout workers together can run at once."""
        return sum(node.slots for node in self.nodes if node.role == "rollout")

    @property
    def depths(self) -> dict[str, dict[str, int]]:
        """Count messages by spool and state."""
        return {
            name: {state: len(messages) for state, messages in spool.items()}
            for name, spool in self.scan.items()
        }


@dataclass(frozen=True)
class Progress:
    """Report the state of the mode's work after an iteration."""

    waits_for: str
    """What the work waits for; empty when all is done."""
    step: int
    """The next batch."""
    recent: dict[str, list[float]]
    """The latest values of metrics, by name."""
    errors: list[str]
    """Messages for people."""


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
    ) -> None:
        self._run, self._kept, self._lease, self._clock = run, kept, lease, clock
        self._max_losses = max_losses
        self._watcher = Watcher(run, lease.beat_s, lease.ttl_s, clock, _remembered(run))
        self._spools = (Spool(run.requests, RolloutRequest), Spool(run.episodes, Episode))
        self._done: dict[str, float] = {}
        self._orphans: dict[Path, float] = {}
        self._since: dict[tuple[str, str], float] = {}
        """Time at which a message was first seen in a spool, by spool and name."""
        self._timer = StepTimer()
        self._endpoints: list[Endpoint] | None = None
        self._beat = 0

    def snapshot(self) -> RunSnapshot:
        """Read the state of the run, and return the claims of dead processes to their spools."""
        now = self._clock()
        scan = {
            name: {state: Spool(self._run.spool(name), Episode).addresses(state) for state in STATES}
            for name in SPOOLS
        }
        claimed = [address for name in SPOOLS for address in scan[name]["claimed"]]
        owners = {address.owner for address in claimed}
        self._watcher.look(owners)
        if any([self._is_lost(address) for address in claimed]):
            for spool in self._spools:
                spool.recover(self._is_lost, self._max_losses)
        self._watcher.forget(owners)
        newest = weights.newest(self._run) or WeightVersion()
        with atomic.storage(self._run.root):
            free = shutil.disk_usage(self._run.root).free
        has_room = free >= self._kept.free_space_floor_gb * 1e9
        snapshot = RunSnapshot(now, scan, newest, self._watcher.live(), has_room)
        held = ((name, a.identity) for name in SPOOLS for s in ("ready", "claimed") for a in scan[name][s])
        self._since = {place: self._since.get(place, now) for place in held}
        self._timer.note(snapshot.learner_step, now)
        return snapshot

    def publish(
        self, snapshot: RunSnapshot, progress: Progress, desired: Mapping[Role, int], status_s: float
    ) -> None:
        """Publish the endpoints and the status: every `status_s`, and at once when the endpoints change."""
        engines = [
            Endpoint(owner=n.owner, url=n.url, versions=n.versions, updating=n.state == "updating")
            for n in snapshot.engines
        ]
        due = self._is_due("status", status_s, snapshot.now)
        if not due and engines == self._endpoints:
            return
        self._beat += 1
        self._endpoints = engines
        table = EndpointTable(beat=self._beat, endpoints=engines, newest=snapshot.newest)
        atomic.put(self._run.endpoints, table, durable=False)
        atomic.put(self._run.status, self._report(snapshot, progress, desired), durable=False)
        atomic.put(self._run.watch, self._watcher.memory(), durable=False)

    def clean_up(self, snapshot: RunSnapshot) -> None:
        """Delete superseded folders once per beat, and files of dead processes six times an hour."""
        if self._is_due("retain", self._lease.beat_s, snapshot.now):
            for folder in retention.superseded(self._run, self._kept, snapshot.nodes):
                log.info("removed %s", folder.name)
                folders.remove(folder)
        if self._is_due("sweep", ORPHAN_S / 6, snapshot.now):
            self._sweep(snapshot)

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
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _report(self, snapshot: RunSnapshot, progress: Progress, desired: Mapping[Role, int]) -> StatusReport:
        alive = [node.role for node in snapshot.nodes]
        silent = [node.role for node in self._watcher.silent()]
        oldest: dict[str, float] = {}
        for (name, _), since in self._since.items():
            oldest[name] = max(oldest.get(name, 0.0), snapshot.now - since)
        full = f"{self._run.root}: too little free space; nothing is dispatched"
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
            errors=[*([] if snapshot.has_room else [full]), *progress.errors],
        )


def _remembered(run: RunDir) -> Memory:
    try:
        return atomic.get(run.watch, Memory)
    except (FileNotFoundError, CorruptRecord) as error:
        log.info("counting from zero: %s", error)
        return Memory()
