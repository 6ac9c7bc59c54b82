"""Leases: who is alive, judged without comparing two nodes' clocks.

A holder rewrites its cell nodes/<owner>.json with a beat that grows. A watcher looks once a beat and
calls an owner dead after `ttl` looks of its own without growth. Looks are counted, not seconds, so a
watcher that was itself asleep for an hour does not wake up to a dead world.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from hpc_swe.errors import CorruptRecord, StorageError
from hpc_swe.records import Node, Role
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic

PATIENCE = 3  # looks that a stall of most leases at once is forgiven

log = logging.getLogger(__name__)


def owner_name(role: Role, job: str) -> str:
    """A name for this process; job is for people, the random end makes it unique."""
    return f"{role}-{job}-{atomic.identity()}"


class Lease:
    """The holder's side: a thread beats until `close`, also while the process works."""

    def __init__(self, run: RunDir, role: Role, job: str, beat_s: float) -> None:
        self._run, self._beat_s = run, beat_s
        self._node = Node(
            owner=owner_name(role, job), role=role, beat=0, host=socket.gethostname(), pid=os.getpid()
        )
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run_beats, name="lease", daemon=True)

    @property
    def node(self) -> Node:
        """What the cell says now."""
        return self._node

    @property
    def owner(self) -> str:
        """This process's name."""
        return self._node.owner

    def __enter__(self) -> "Lease":
        self.show()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self._run.node(self.owner).unlink(missing_ok=True)

    def show(self, **changes: object) -> None:
        """Change what the cell says of this process, at once.

        Raises:
            StorageError: The cell could not be written; the beat thread will try again.
        """
        with self._lock:
            self._node = msgspec.structs.replace(self._node, beat=self._node.beat + 1, **changes)
            atomic.put(self._run.node(self.owner), self._node, durable=False)

    def _run_beats(self) -> None:
        while not self._closed.wait(self._beat_s):
            try:
                self.show()
            except (StorageError, OSError) as error:
                log.warning("beat failed: %s", error)


@dataclass
class _Sighting:
    node: Node | None
    missed: int = 0
    unnamed: dict[str, int] = field(default_factory=dict)


class Watcher:
    """The observer's side. An owner never seen before gets the full grace."""

    def __init__(
        self, run: RunDir, beat_s: float, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._beat_s, self._clock = run, beat_s, clock
        self._limit = max(2, round(ttl_s / beat_s))
        self._seen: dict[str, _Sighting] = {}
        self._last = float("-inf")
        self._stalls = 0

    def look(self, owners: Iterable[str] = ()) -> None:
        """Look at all cells, at most once a beat. `owners` hold claims and may never have shown a cell."""
        now = self._clock()
        if now - self._last < self._beat_s:
            return
        self._last = now
        cells, unreadable = self._read()
        before = {owner for owner, sighting in self._seen.items() if sighting.missed < self._limit}
        for owner in {*cells, *self._seen, *owners} - unreadable:
            self._count(owner, cells.get(owner))
        expired = {owner for owner in before if self._seen[owner].missed >= self._limit}
        self._forgive_stall(before, expired)

    def is_dead(self, owner: str) -> bool:
        """Whether the owner's beat stood still for the whole grace."""
        sighting = self._seen.get(owner)
        return sighting is not None and sighting.missed >= self._limit

    def is_abandoned(self, owner: str, claim: str) -> bool:
        """Whether a live owner's last two beats did not name a claim that lies under its name."""
        sighting = self._seen.get(owner)
        if sighting is None or sighting.node is None or self.is_dead(owner):
            return False
        if claim in sighting.node.claims:
            sighting.unnamed.pop(claim, None)
            return False
        first = sighting.unnamed.setdefault(claim, sighting.node.beat)
        return sighting.node.beat >= first + 2

    def live(self, role: Role | None = None) -> list[Node]:
        """Cells of the living."""
        nodes = [s.node for o, s in sorted(self._seen.items()) if s.node is not None and not self.is_dead(o)]
        return [node for node in nodes if role is None or node.role == role]

    def forget(self, keep: Iterable[str]) -> list[str]:
        """Dead owners that hold nothing any more: their cells are removed and they are forgotten."""
        gone = [owner for owner in self._seen if self.is_dead(owner) and owner not in set(keep)]
        for owner in gone:
            del self._seen[owner]
            self._run.node(owner).unlink(missing_ok=True)
        return gone

    def _read(self) -> tuple[dict[str, Node], set[str]]:
        found: dict[str, Node] = {}
        unreadable = set()  # does not count as a look
        for name in atomic.names(self._run.nodes):
            owner = name.removesuffix(".json")
            try:
                found[owner] = atomic.get(self._run.node(owner), Node)
            except FileNotFoundError:
                continue
            except (CorruptRecord, StorageError, OSError) as error:
                log.warning("unreadable lease: %s", error)
                unreadable.add(owner)
        return found, unreadable

    def _count(self, owner: str, node: Node | None) -> None:
        sighting = self._seen.get(owner)
        if sighting is None:
            self._seen[owner] = _Sighting(node)
        elif node is not None and (sighting.node is None or node.beat != sighting.node.beat):
            sighting.node, sighting.missed = node, 0
        else:
            sighting.missed += 1

    def _forgive_stall(self, before: set[str], expired: set[str]) -> None:
        if len(expired) < 3 or 2 * len(expired) <= len(before) or self._stalls == PATIENCE:
            self._stalls = 0
            return
        self._stalls += 1
        log.warning("stall: %d of %d leases stood still together; looking again", len(expired), len(before))
        for owner in expired:
            self._seen[owner].missed = self._limit - 1
