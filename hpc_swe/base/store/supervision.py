"""Find the parts of a run that are alive and make no progress, and record what is done about them.

A part is a process, or all processes of a role, that has work. It is stuck when it has had work for a whole
limit and has accomplished nothing. Time counts only while the part's heartbeat is seen to change, and at most
`LONGEST_LOOK_BEATS` beats for each look: a watcher that was suspended, a file system that stalls and a dead
process make nobody stuck. Leases and watchdogs end processes that are dead or stopped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.records import Node, Record, Role
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic

LONGEST_LOOK_BEATS = 3


class StuckProcess(Record, frozen=True, kw_only=True):
    """Name a process that its watchdog ends: the lease, and where the watchdog finds it."""

    owner: str
    host: str
    pid: int


class Still(Record, frozen=True, kw_only=True):
    """Say how long a part has accomplished nothing."""

    seen: str
    """What it had accomplished; any change starts the clock again."""
    beat: int
    seconds: float = 0.0


class ClockMemory(Record, frozen=True, kw_only=True):
    """Carry the watcher's clocks over a restart. Watchdogs do not read them: they grow with the workers."""

    number: int = 0
    """The verdict after which these clocks started; they are void after another one."""
    farthest: int = -1
    """Most steps of coordinator and learner together: what a restarted learner repeats is no progress."""
    still: dict[str, Still] = {}
    """RunPart -> its clock, of the parts that have done nothing for a while."""


class Verdict(Record, frozen=True, kw_only=True):
    """Record the last part that was found stuck. All watchdogs of the run read this."""

    number: int = 0
    """Verdicts of this run so far; 0 while there is none."""
    role: Role = "coordinator"
    processes: list[StuckProcess] = []
    """Watchdogs of these processes write their stacks, end them and start them again."""
    reason: str = ""
    tries: int = 0
    """Restarts of stuck parts since the run's last progress."""
    ignored: int = 0
    """Verdicts in a row that named processes that no watchdog had ended after the verdict before."""
    gave_up: bool = False
    """The run ends: no restart is left."""

    def message(self, tries: int) -> str:
        """Describe the verdict for people; empty when the run has made progress since, or had no verdict."""
        if not (self.tries or self.gave_up or self.ignored):
            return ""
        if not self.processes:
            return f"given up: {self.reason}"
        names = [str(RunDir(Path()).stack(self.number, each.owner)) for each in self.processes]
        done = f"given up after {self.tries} restarts" if self.gave_up else f"restart {self.tries} of {tries}"
        if self.ignored:
            host = self.processes[0].host
            done += f" (its watchdog, jobs.run on {host}, was asked {self.ignored} times and did not end it)"
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


def find_stuck(parts: Sequence[RunPart], still: Mapping[str, Still]) -> list[RunPart]:
    """Return the parts that are stuck, in the same order."""
    return [part for part in parts if part.name in still and still[part.name].seconds >= part.limit_s > 0]


def read(run: RunDir) -> Verdict:
    """Read the last verdict; an empty one when there is none, or when it cannot be decoded."""
    try:
        return atomic.get(run.supervision, Verdict)
    except (FileNotFoundError, CorruptRecord):
        return Verdict()


def forget(run: RunDir) -> None:
    """Count from zero again, when a person starts a run that was given up."""
    if (last := read(run)).gave_up:
        atomic.put(run.supervision, Verdict(number=last.number))


def read_clocks(run: RunDir) -> ClockMemory:
    """Read the watcher's memory; an empty one when there is none, or when it cannot be decoded."""
    try:
        return atomic.get(run.clocks, ClockMemory)
    except (FileNotFoundError, CorruptRecord):
        return ClockMemory()


def following(
    before: Verdict, role: Role, processes: Sequence[StuckProcess], reason: str, tries: int
) -> Verdict:
    """Return the verdict after `before`. It gives up when `tries` restarts have brought no progress.

    A verdict that no watchdog obeyed was no restart; so many of them in a row bring no restart either.
    """
    is_ignored = {each.owner for each in processes} <= {each.owner for each in before.processes}
    ignored = before.ignored + 1 if is_ignored else 0
    return Verdict(
        number=before.number + 1,
        role=role,
        processes=list(processes),
        reason=reason,
        tries=before.tries if is_ignored else min(before.tries + 1, tries),
        ignored=ignored,
        gave_up=ignored > tries if is_ignored else before.tries >= tries,
    )


def publish(run: RunDir, verdict: Verdict) -> None:
    """Ask the watchdogs to restart the processes of a verdict, or to end them if it gives up."""
    with atomic.storage(run.stacks):
        run.stacks.mkdir(exist_ok=True)
    atomic.put(run.supervision, verdict)


def _later(before: Still | None, part: RunPart, passed_s: float) -> Still:
    if before is None or before.seen != part.seen:
        return Still(seen=part.seen, beat=part.beat)
    beats = before.beat != part.beat
    return Still(seen=part.seen, beat=part.beat, seconds=before.seconds + (passed_s if beats else 0.0))
