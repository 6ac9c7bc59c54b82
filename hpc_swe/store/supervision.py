"""Find the parts of a run that are alive and make no progress, and record what is done about them.

A part is a process, or all processes of a role, that has work. It is stuck when it has had work for a whole
limit and has accomplished nothing. Time counts only while the part's heartbeat is seen to change, and at most
`LONGEST_LOOK_BEATS` beats for each look: a watcher that was suspended, a file system that stalls and a dead
process make nobody stuck. Leases and keepers end processes that are dead or stopped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_swe.errors import CorruptRecord
from hpc_swe.records import Node, Record, Role
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic

LONGEST_LOOK_BEATS = 3


class StuckProcess(Record, frozen=True, kw_only=True):
    """Name a process that its keeper ends: the lease, and where the keeper finds it."""

    owner: str
    host: str
    pid: int


class Still(Record, frozen=True, kw_only=True):
    """Say how long a part has accomplished nothing."""

    seen: str
    """What it had accomplished; any change starts the clock again."""
    beat: int
    seconds: float = 0.0


class Verdict(Record, frozen=True, kw_only=True):
    """Record the last part that was found stuck. The watcher also keeps its clocks here over a restart."""

    number: int = 0
    """Verdicts of this run so far; 0 while there is none."""
    role: Role = "coordinator"
    processes: list[StuckProcess] = []
    """Keepers of these processes write their stacks, end them and start them again."""
    reason: str = ""
    tries: int = 0
    """Restarts of stuck parts since the run's last progress."""
    gave_up: bool = False
    """The run ends: no restart is left."""
    still: dict[str, Still] = {}
    """RunPart -> its clock."""

    def message(self, tries: int) -> str:
        """Describe the verdict for people; empty when the run has made progress since, or had no verdict."""
        if not (self.tries or self.gave_up):
            return ""
        names = [str(RunDir(Path()).stack(self.number, each.owner)) for each in self.processes]
        done = f"given up after {self.tries} restarts" if self.gave_up else f"restart {self.tries} of {tries}"
        return f"stuck {self.role}, {done}, see {', '.join(names[:2])}: {self.reason}"


@dataclass(frozen=True)
class RunPart:
    """Describe what may be stuck at one look."""

    name: str
    role: Role
    nodes: Sequence[Node]
    seen: str
    """What it has accomplished so far, in any form."""
    reason: str
    """What it does not do, as words that follow its name."""
    limit_s: float

    @property
    def beat(self) -> int:
        return sum(node.beat for node in self.nodes)


@dataclass
class Clocks:
    """Measure for how long each part has had work and accomplished nothing."""

    longest_look_s: float
    still: dict[str, Still] = field(default_factory=dict)
    _looked_at: float | None = None

    def look(self, parts: Sequence[RunPart], now: float) -> None:
        """Look at the parts that have work now; the clocks of all others are dropped."""
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, self.longest_look_s)
        self._looked_at = now
        self.still = {part.name: _later(self.still.get(part.name), part, passed) for part in parts}

    def restart(self) -> None:
        """Start all clocks again: what follows from a part that was stuck needs time to follow."""
        self.still = {}


def first_stuck(parts: Sequence[RunPart], still: Mapping[str, Still]) -> list[RunPart]:
    """Return the earliest of the parts, which are given in the order of the pipeline, that is stuck.

    Stuck processes of one role come together, since one fault may have hit them all.
    """
    stuck = [part for part in parts if part.name in still and still[part.name].seconds >= part.limit_s > 0]
    return [part for part in stuck if part.role == stuck[0].role]


def read(run: RunDir) -> Verdict:
    """Read the last verdict; an empty one when there is none, or when it cannot be decoded."""
    try:
        return atomic.get(run.supervision, Verdict)
    except (FileNotFoundError, CorruptRecord):
        return Verdict()


def following(
    before: Verdict, role: Role, processes: Sequence[StuckProcess], reason: str, tries: int
) -> Verdict:
    """Return the verdict after `before`. It gives up when `tries` restarts have brought no progress."""
    return Verdict(
        number=before.number + 1,
        role=role,
        processes=list(processes),
        reason=reason,
        tries=min(before.tries + 1, tries),
        gave_up=before.tries >= tries,
    )


def publish(run: RunDir, verdict: Verdict) -> None:
    """Ask the keepers to restart the processes of a verdict; one that gives up orders the run to stop."""
    with atomic.storage(run.stacks):
        run.stacks.mkdir(exist_ok=True)
    atomic.put(run.supervision, verdict)
    if verdict.gave_up:
        atomic.write(run.stop, b"")


def _later(before: Still | None, part: RunPart, passed_s: float) -> Still:
    if before is None or before.seen != part.seen:
        return Still(seen=part.seen, beat=part.beat)
    beats = before.beat != part.beat
    return Still(seen=part.seen, beat=part.beat, seconds=before.seconds + (passed_s if beats else 0.0))
