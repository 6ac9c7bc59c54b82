"""Find which part of the run makes no progress, and have its watchdog restart it.

`parts` says which parts have work and what they have accomplished; it is pure. The coordinator decides
because it sees the whole run anyway, and its own watchdog watches it (jobs/supervision.py). A part that waits
for another one has no work: a worker without an engine, a learner without a batch, a role whose jobs wait in
the queue.
"""

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from hpc_swe.base.errors import StuckRun
from hpc_swe.base.records import Node, Role
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, supervision, weights
from hpc_swe.base.store.lease import Lease
from hpc_swe.base.store.supervision import ClockMemory, Clocks, RunPart, StuckProcess
from hpc_swe.roles.coordinator.snapshot import Progress, RunSnapshot

KEPT_VERDICTS = 20  # stacks of older ones are deleted
LAST_STACKS_S = 180.0  # longest wait for the watchdogs of a verdict that gives up, before the order to stop
MOST_REFUSALS = 4  # one more than those after which a supervisor starts its engine anew
REFUSED_S = 240.0  # every engine refuses new weights for so long, and more than once
SPOOL_OF: dict[Role, str] = {"rollout": "requests", "reward": "episodes"}

log = logging.getLogger(__name__)


def parts(
    snapshot: RunSnapshot, step: int, steps: int, roles: Sequence[Role], limits: Mapping[Role, float]
) -> list[RunPart]:
    """List the parts that have work, in the order of the pipeline.

    `step` is the coordinator's next batch, `steps` the run's last, and `roles` those that the run has. The
    coordinator itself has work when nobody else has, and nobody is awaited.
    """
    found = [*_engines(snapshot, limits), *_workers(snapshot, "rollout", limits)]
    found += [*_workers(snapshot, "reward", limits), *_learners(snapshot, step, steps, limits)]
    looping = [_loop(node, limits) for node in snapshot.nodes if node.role in ("inference", *SPOOL_OF)]
    present = {node.role for node in snapshot.nodes}
    is_awaited = "inference" in roles and not snapshot.engines
    is_idle = not any(snapshot.scan[spool][s] for spool in SPOOL_OF.values() for s in ("ready", "claimed"))
    if not found and is_idle and present >= {*roles} and snapshot.has_room and not is_awaited:
        mine = [node for node in snapshot.nodes if node.role == "coordinator"]
        reason, limit_s = "nobody else has work, and the coordinator makes none", limits["coordinator"]
        looping.append(RunPart("work of all", "coordinator", mine, _whole(snapshot, step), reason, limit_s))
    order = ("inference", "rollout", "reward", "learner", "coordinator")
    return sorted([*found, *looping], key=lambda part: order.index(part.role))


def _engines(snapshot: RunSnapshot, limits: Mapping[Role, float]) -> Iterator[RunPart]:
    for node in snapshot.nodes:
        serves = node.role == "inference" and node.state in ("ready", "updating")
        if serves and node.versions and not weights.recent(node.versions, snapshot.newest):
            reason = f"{node.owner} does not load {snapshot.newest.name}"
            seen = ",".join(version.name for version in node.versions)
            yield RunPart(f"version of {node.owner}", "inference", [node], seen, reason, limits["inference"])


def _workers(snapshot: RunSnapshot, role: Role, limits: Mapping[Role, float]) -> Iterator[RunPart]:
    """Yield each claim that is worked on, and all workers together when nobody takes what is ready."""
    if role == "rollout" and not snapshot.engines:
        return
    nodes = [node for node in snapshot.nodes if node.role == role]
    for node in nodes:
        for claim, steps in zip(node.claims, node.steps, strict=False):
            reason = f"{node.owner} works on {claim} without a result"
            yield RunPart(f"{claim} of {node.owner}", role, [node], str(steps), reason, limits[role])
    ready = snapshot.scan[SPOOL_OF[role]]["ready"]
    free = [node for node in nodes if node.state == "ready" and not node.claims]
    if ready and free and len(free) == len(nodes):
        seen = str(zlib.crc32(repr(sorted(address.identity for address in ready)).encode()))
        reason = f"no worker takes any of {len(ready)} messages in {SPOOL_OF[role]}/ready"
        yield RunPart(f"claims of {role}", role, free, seen, reason, limits[role])


def _learners(
    snapshot: RunSnapshot, step: int, steps: int, limits: Mapping[Role, float]
) -> Iterator[RunPart]:
    for node in snapshot.nodes:
        if node.role == "learner" and node.state != "draining" and (step > node.step or node.step >= steps):
            reason = f"{node.owner} does not finish step {node.step}"
            seen = f"{node.step} {snapshot.newest.name}"
            yield RunPart(f"step of {node.owner}", "learner", [node], seen, reason, limits["learner"])


def _loop(node: Node, limits: Mapping[Role, float]) -> RunPart:
    reason = f"the main loop of {node.owner} stands still"
    return RunPart(f"loop of {node.owner}", node.role, [node], str(node.loops), reason, limits[node.role])


def _whole(snapshot: RunSnapshot, step: int) -> str:
    ready = sorted(f"{spool} {a.identity}" for spool, found in snapshot.scan.items() for a in found["ready"])
    names = zlib.crc32("\n".join(ready).encode())
    return f"{step} {snapshot.learner_step} {snapshot.newest.name} {names}"


@dataclass
class Supervision:
    """Look at the run once per heartbeat, and publish a verdict when a part is stuck."""

    lease: Lease
    """The coordinator's own; its watchdog sees there that the main loop turns."""
    run: RunDir
    limits: Mapping[Role, float]
    """Role -> seconds without an accomplishment after which a part of it is stuck; empty: none ever is."""
    tries: int
    """Restarts without progress in between after which the run is given up."""
    roles: Sequence[Role]
    steps: int
    beat_s: float
    _due: float = field(default=float("-inf"), init=False)
    _results: set[str] | None = field(default=None, init=False)
    _stop_at: float = field(default=0.0, init=False)
    _refused_since: float | None = field(default=None, init=False)
    """Since when every engine refuses new weights and the learner has no batch left to train."""
    _refused_before: int = field(default=0, init=False)
    """Refusals in a row while the learner still had a batch."""

    def __post_init__(self) -> None:
        self._verdict = supervision.read(self.run)
        self._memory = supervision.read_clocks(self.run)
        still = self._memory.still if self._memory.number == self._verdict.number else {}
        self._clocks = Clocks(supervision.LONGEST_LOOK_BEATS * self.beat_s, dict(still))

    @property
    def verdicts(self) -> int:
        """Return how many verdicts the run has had."""
        return self._verdict.number

    @property
    def longest_s(self) -> float:
        """Return the longest time without progress after which a part is restarted; 0 if none ever is."""
        return max(self._limits().values(), default=0.0)

    def look(self, snapshot: RunSnapshot, progress: Progress) -> None:
        """Look at the run if a look is due.

        When a part is stuck after all its tries, or every engine refuses new weights, order the run to stop
        and raise StuckRun. Raise StorageError when the verdict cannot be written.
        """
        if not self._verdict.gave_up and self._is_refused(snapshot, progress):
            self._give_up(snapshot.why_refused)
        if self._verdict.gave_up:
            self._stop(snapshot)
        elif self.limits and snapshot.now >= self._due:
            self._due = snapshot.now + self.beat_s
            self._look(snapshot, progress)

    def _is_refused(self, snapshot: RunSnapshot, progress: Progress) -> bool:
        """Return whether every engine refuses new weights so often in a row that none will ever load any.

        As long as the learner has a batch to train, it may still publish weights that engines load.
        """
        if not snapshot.refusals or progress.awaits_learner:
            self._refused_since, self._refused_before = None, snapshot.refusals
            return False
        if self._refused_since is None:
            self._refused_since = snapshot.now
        count = snapshot.refusals - self._refused_before
        return count >= MOST_REFUSALS or (count > 1 and snapshot.now - self._refused_since >= REFUSED_S)

    def _give_up(self, reason: str) -> None:
        """Publish a verdict that ends the run; it names no process, since none is stuck."""
        number = self._verdict.number + 1
        verdict = supervision.Verdict(number=number, role="inference", reason=reason, gave_up=True)
        supervision.publish(self.run, verdict)
        self._verdict = verdict
        log.error("%s", verdict.message(self.tries))

    def _stop(self, snapshot: RunSnapshot) -> None:
        """Stop the run once the watchdogs have ended the stuck processes, or at once after a restart.

        Workers whose main loops turn would obey the order before anybody has asked for their stacks.
        """
        named = {each.owner for each in self._verdict.processes}
        if snapshot.now >= self._stop_at or named.isdisjoint(node.owner for node in snapshot.nodes):
            atomic.write(self.run.stop, b"")
            raise StuckRun(f"{self.run.root}: {self._verdict.message(self.tries)}")

    def _limits(self) -> dict[Role, float]:
        """Return the limits of this try: a step that is honest and slow is repeated, so it gets more time."""
        factor = 1 + self._verdict.tries
        return {role: limit * (factor if role == "learner" else 1) for role, limit in self.limits.items()}

    def _look(self, snapshot: RunSnapshot, progress: Progress) -> None:
        found = parts(snapshot, progress.step, self.steps, self.roles, self._limits())
        self._clocks.look(found, snapshot.now)
        has_progressed = self._has_progressed(snapshot, progress.step)
        if (self._verdict.tries or self._verdict.ignored) and has_progressed:
            log.info("progressed after %d restarts of stuck parts", self._verdict.tries)
            verdict = msgspec.structs.replace(self._verdict, tries=0, ignored=0)
            atomic.put(self.run.supervision, verdict, durable=False)
            self._verdict = verdict
        stuck = supervision.find_stuck(found, self._clocks.still)
        if stuck:
            self._judge(stuck, snapshot.now)
        self._remember(step=progress.step + snapshot.learner_step)

    def _has_progressed(self, snapshot: RunSnapshot, step: int) -> bool:
        """Return whether there is a new result or step; those that a restarted learner repeats are not."""
        results = {address.identity for address in snapshot.scan["scored"]["ready"]}
        known, self._results = self._results, results
        is_farther = -1 < self._memory.farthest < step + snapshot.learner_step
        return is_farther or (known is not None and bool(results - known))

    def _judge(self, every: Sequence[RunPart], now: float) -> None:
        """Publish a verdict about the earliest role that is stuck; one that gives up names all roles.

        Stuck processes of one role are restarted together, since one fault may have hit them all. Those of
        later roles may only wait for them.
        """
        stuck = [part for part in every if part.role == every[0].role]
        still_s = self._clocks.still[stuck[0].name].seconds
        reasons = "; ".join(dict.fromkeys(part.reason for part in stuck[:3]))
        reason = f"no progress for {still_s:.0f} s: {reasons}"
        named = processes_of(stuck)
        verdict = supervision.following(self._verdict, stuck[0].role, named, reason, self.tries)
        if verdict.gave_up:
            verdict = msgspec.structs.replace(verdict, processes=processes_of(every))
        supervision.publish(self.run, verdict)  # if it fails, the next look judges again
        self._verdict = verdict
        self._clocks.restart()
        self._stop_at = now + LAST_STACKS_S
        log.error("%s", verdict.message(self.tries))
        for name in atomic.names(self.run.stacks):
            if name < f"{self._verdict.number - KEPT_VERDICTS:06d}":
                (self.run.stacks / name).unlink(missing_ok=True)

    def _remember(self, step: int) -> None:
        still = {name: clock for name, clock in self._clocks.still.items() if clock.seconds}
        farthest = max(self._memory.farthest, step)
        memory = ClockMemory(number=self._verdict.number, farthest=farthest, still=still)
        if memory != self._memory:
            atomic.put(self.run.clocks, memory, durable=False)
            self._memory = memory


def processes_of(found: Sequence[RunPart]) -> list[StuckProcess]:
    """Name the processes of some parts, each once."""
    nodes = {node.owner: node for part in found for node in part.nodes}
    return [StuckProcess(owner=n.owner, host=n.host, pid=n.pid) for n in nodes.values()]
