"""Keep leases: tell which processes are alive without comparing the clocks of two nodes.

A holder rewrites its cell nodes/<owner>.json with a beat that grows. A watcher looks at the cells once per
beat and declares an owner dead after `ttl_s / beat_s` of its own looks without growth. It counts looks, not
seconds, so a watcher that was suspended for an hour does not find all other processes dead.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpc_swe.base.errors import CorruptRecord, StorageError
from hpc_swe.base.records import Node, Record, Role
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic

MAX_STALLS = 3  # successive looks at which a stall of most leases at once is forgiven

log = logging.getLogger(__name__)


class Lease:
    """Hold a lease inside the `with` block: a thread beats there, also while the process works."""

    def __init__(self, run: RunDir, role: Role, job: str, beat_s: float) -> None:
        self._run, self._beat_s = run, beat_s
        self.owner = f"{role}-{job}-{atomic.identity()}"
        """Name of this process. The job is for people to read; the random end makes the name unique."""
        self.node = Node(owner=self.owner, role=role, beat=0, host=socket.gethostname(), pid=os.getpid())
        """Present content of the cell."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run_beats, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        self.publish()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        _remove(self._run.node(self.owner))

    def publish(self, **changes: object) -> None:
        """Change fields of this process's cell and write it at once.

        After a StorageError the beat thread tries again.
        """
        with self._lock:
            self.node = msgspec.structs.replace(self.node, beat=self.node.beat + 1, **changes)
            atomic.put(self._run.node(self.owner), self.node, durable=False)

    def update(self, **changes: object) -> None:
        """Change fields of this process's cell; the next beat writes them."""
        with self._lock:
            self.node = msgspec.structs.replace(self.node, **changes)

    def turn(self) -> None:
        """Count an iteration of the main loop; the next beat shows that the loop does not stand still."""
        self.update(loops=self.node.loops + 1)

    def _run_beats(self) -> None:
        while not self._closed.wait(self._beat_s):
            try:
                self.publish()
            except (StorageError, OSError) as error:
                log.warning("beat failed: %s", error)


@dataclass
class _Sighting:
    node: Node | None
    beat: int
    """The beat at the last look that counted; -1 when none was read."""
    is_present: bool = True
    """Whether the last look found the cell; a process that ends in order removes it."""
    missed: int = 0
    """Successive looks without a new beat."""
    grown: int = 0
    """Looks that found a new beat."""
    unnamed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Claim -> `grown` when the claim was first and last found missing from the cell."""


class Memory(Record, frozen=True, kw_only=True):
    """Carry a watcher's counts over a restart, so that restarts do not keep dead owners alive."""

    since_look_s: float = 0.0
    """Seconds between the watcher's last look and the writing of this record."""
    stalls: int = 0
    """Successive looks at which a stall was forgiven."""
    still: dict[str, tuple[int, int]] = {}
    """Owner -> its beat at the last look (-1 when none was read), and the looks that found the same beat."""


class Watcher:
    """Watch the leases of other processes. An owner that was never seen before gets the full time to live."""

    def __init__(
        self,
        run: RunDir,
        beat_s: float,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        memory: Memory | None = None,
        own: str = "",
    ) -> None:
        """Count no look at which the beat of the owner `own`, this process, did not grow, if it is given."""
        self._run, self._beat_s, self._clock, self._own = run, beat_s, clock, own
        self._own_beat = -1
        self._limit = max(2, round(ttl_s / beat_s))
        self._seen: dict[str, _Sighting] = {}
        self._last = float("-inf")
        self._remembered = memory or Memory()
        self._stalls = self._remembered.stalls

    def look(self, owners: Iterable[str] = ()) -> None:
        """Look at all cells, at most once per beat. `owners` hold claims; they may have no cell."""
        now = self._clock()
        if now - self._last < self._beat_s:
            return
        is_first = self._last == float("-inf")
        self._last = now - (min(self._remembered.since_look_s, self._beat_s) if is_first else 0.0)
        cells, unreadable = self._read()
        if self._is_refused(cells.get(self._own)):
            return
        alive = {owner for owner in self._seen if not self.is_dead(owner)}
        for owner in {*cells, *self._seen, *owners} - unreadable:
            self._count(owner, cells.get(owner))
        self._forgive_stall(alive)

    def refresh(self, owners: Iterable[str]) -> None:
        """Read the cells of present owners again between two looks, which counts for or against nobody."""
        for owner in owners:
            try:
                node = atomic.get(self._run.node(owner), Node)
            except (OSError, CorruptRecord, StorageError):
                continue  # the next look tells what it means
            if node.owner == owner and owner in self._seen:
                self._seen[owner].node = node

    def memory(self) -> Memory:
        """Return the counts for the next watcher; an owner whose beat grew at the last look needs none."""
        still = {owner: (s.beat, s.missed) for owner, s in self._seen.items() if s.missed or not s.grown}
        return Memory(since_look_s=self._clock() - self._last, stalls=self._stalls, still=still)

    def is_dead(self, owner: str) -> bool:
        """Return whether the owner's beat did not change for the whole time to live."""
        sighting = self._seen.get(owner)
        return sighting is not None and sighting.missed >= self._limit

    def is_abandoned(self, owner: str, claim: str) -> bool:
        """Return whether a live owner left a claim out of its cell at two successive looks.

        Looks count, not beats: an owner also beats at each change, and may be about to name a claim that it
        just took. Ask at every look; a claim that was not asked about at the look before counts as new.
        """
        sighting = self._seen.get(owner)
        if sighting is None or sighting.node is None or self.is_dead(owner):
            return False
        if claim in sighting.node.claims:
            sighting.unnamed.pop(claim, None)
            return False
        first, last = sighting.unnamed.get(claim, (sighting.grown, sighting.grown))
        if last < sighting.grown - 1:
            first = sighting.grown
        sighting.unnamed[claim] = (first, sighting.grown)
        return sighting.grown >= first + 2

    def live(self, role: Role | None = None) -> list[Node]:
        """Return the cells of live processes, sorted by owner; of one role when it is given."""
        present = [(o, s.node) for o, s in sorted(self._seen.items()) if s.is_present and s.node is not None]
        return [node for o, node in present if not self.is_dead(o) and role in (None, node.role)]

    def silent(self) -> list[Node]:
        """Return the cells of live processes whose beat did not change at the last two looks."""
        return [node for node in self.live() if self._seen[node.owner].missed >= 2]

    def forget(self, keep: Iterable[str]) -> list[str]:
        """Forget dead owners other than those to `keep`, remove their cells, and return their names."""
        gone = sorted({owner for owner in self._seen if self.is_dead(owner)} - set(keep))
        for owner in gone:
            del self._seen[owner]
            _remove(self._run.node(owner))
        return gone

    def _is_refused(self, own: Node | None) -> bool:
        """Return whether this process could not beat, as on a full file system: others could not either."""
        before, self._own_beat = self._own_beat, own.beat if own else self._own_beat
        is_refused = bool(self._own) and self._own_beat == before
        if is_refused:
            log.warning("not judged: the beat of %s, this process, does not grow either", self._own)
        return is_refused

    def _read(self) -> tuple[dict[str, Node], set[str]]:
        found: dict[str, Node] = {}
        unreadable = set()  # does not count as a look: the file system is at fault, not the owner
        for name in atomic.names(self._run.nodes):
            owner = name.removesuffix(".json")
            try:
                node = atomic.get(self._run.nodes / name, Node)
                if node.owner == owner:
                    found[owner] = node
            except FileNotFoundError:
                continue
            except CorruptRecord as error:  # counts as a look: a node that dies in a write leaves such a cell
                log.warning("corrupt lease: %s", error)
            except (StorageError, OSError) as error:
                log.warning("unreadable lease: %s", error)
                unreadable.add(owner)
        return found, unreadable

    def _count(self, owner: str, node: Node | None) -> None:
        sighting = self._seen.get(owner)
        if sighting is None:
            late = -1 if self._remembered.since_look_s else 0  # the first look after a restart comes early
            beat, missed = self._remembered.still.get(owner, (node.beat if node else -1, late))
            self._seen[owner] = _Sighting(node, beat, node is not None, missed)
            return
        sighting.is_present = node is not None
        if node is not None and node.beat != sighting.beat:
            sighting.node, sighting.missed, sighting.grown = node, 0, sighting.grown + 1
            sighting.beat = node.beat
        else:
            sighting.missed += 1

    def _forgive_stall(self, alive: set[str]) -> None:
        """Keep owners alive when most leases stop growing together: then the file system is at fault.

        `alive` are the owners that lived before this look. Their beats fall anywhere between two looks, so a
        common stall makes them expire over two successive looks.
        """
        expired = {owner for owner in alive if self.is_dead(owner)}
        still = [owner for owner in alive if self._seen[owner].missed >= self._limit - 1]
        if not expired or len(still) < 3 or 2 * len(still) <= len(alive) or self._stalls == MAX_STALLS:
            self._stalls = 0
            return
        self._stalls += 1
        log.warning("stall: %d of %d leases stopped growing together; looking again", len(still), len(alive))
        for owner in expired:
            self._seen[owner].missed = self._limit - 1


def _remove(cell: Path) -> None:
    try:
        cell.unlink(missing_ok=True)
    except OSError as error:
        log.warning("lease not removed: %s", error)  # watchers will find that it no longer grows
