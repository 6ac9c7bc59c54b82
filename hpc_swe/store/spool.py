"""A spool: a folder of immutable messages whose state is where they lie.

    ready/      <identity>~<losses>            published, waiting for a worker
    claimed/    <identity>~<losses>~<owner>    one worker has it
    dead/       <identity>~<losses>            lost too often or corrupt, kept for a person to look at

Every change of state is one rename(2) inside one file system, which is atomic: a reader never sees
half a message, and of two workers that reach for one, exactly one gets it. There are no locks. A
message that is dealt with is unlinked. A worker that dies leaves its claim behind; `recover` puts
it back, one loss older.
"""

import logging
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from hpc_swe.errors import CorruptRecord
from hpc_swe.records import Record
from hpc_swe.store import atomic

R = TypeVar("R", bound=Record)
M = TypeVar("M")
STATES = ("ready", "claimed", "dead")
NAME = re.compile(r"([^~]+)~(0|[1-9][0-9]{0,3})(?:~([^~]+))?")
LONGEST = 205  # bytes of a name in ready/; the rest of 255 is for an owner's, or for a temporary's
WINDOW = 32  # a claim starts anywhere among the oldest, so that two workers seldom reach for the same
TRIES = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """A message's file name, taken apart."""

    identity: str
    losses: int
    owner: str = ""

    @classmethod
    def parse(cls, name: str) -> "Address | None":
        """None for a foreign file: not ours to touch."""
        parts = NAME.fullmatch(name)
        if parts is None or len(os.fsencode(f"{parts[1]}~{parts[2]}")) > LONGEST:
            return None
        return cls(parts[1], int(parts[2]), parts[3] or "")

    @property
    def ready(self) -> str:
        """Name in ready/ and dead/."""
        return f"{self.identity}~{self.losses}"

    @property
    def claimed(self) -> str:
        """Name in claimed/."""
        return f"{self.ready}~{self.owner}"


@dataclass(frozen=True)
class Claim(Generic[R]):
    """A message that this process alone holds, until it finishes, gives back or dies."""

    root: Path
    address: Address
    message: R

    @property
    def name(self) -> str:
        """The message's identity; results are named by it."""
        return self.address.identity

    @property
    def path(self) -> Path:
        """Where the claim lies."""
        return self.root / "claimed" / self.address.claimed

    def finish(self) -> bool:
        """Drop the message. Publish what came of it first. False when the claim was lost meanwhile."""
        try:
            with atomic.storage(self.path):
                os.unlink(self.path)
        except FileNotFoundError:
            log.warning("lost claim %s", self.name)
            return False
        return True

    def give_back(self) -> bool:
        """Put the message back undone; counts against nobody. False when the claim was lost meanwhile."""
        return _move(self.path, self.root / "ready" / self.address.ready)


class Spool(Generic[R]):
    """Messages of one record type in one folder."""

    def __init__(self, root: Path, record: type[R]) -> None:
        self.root = root
        self._record = record
        self.misses = 0
        """Claims that others were faster at, so far."""

    def put(self, name: str, message: R) -> None:
        """Publish a result under its identity. One that lies there stays, and this one is dropped.

        A process that was given up may come late, when the reader has counted the first already.
        """
        path = self.root / "ready" / Address(name, 0).ready
        try:
            atomic.write_new(path, atomic.encode(path, message))
        except FileExistsError:
            log.warning("dropped a second result of %s: the first lies in %s", name, path.parent)

    def ask(self, name: str, message: R) -> None:
        """Publish a request under its identity. What lies there is the same request, and is replaced."""
        atomic.put(self.root / "ready" / Address(name, 0).ready, message)

    def addresses(self, state: str) -> list[Address]:
        """Messages in one state; evaluation first, then oldest first, which is how identities sort."""
        found = (Address.parse(name) for name in atomic.names(self.root / state))
        return [address for address in found if address and bool(address.owner) == (state == "claimed")]

    def claim(self, owner: str) -> Claim[R] | None:
        """Take one of the oldest ready messages, or None when there is none or others are at it."""
        return next(self.claims(owner), None)

    def claims(self, owner: str) -> Iterator[Claim[R]]:
        """Take messages off one listing, as many as the caller asks for."""
        until = self.misses + TRIES
        for address in in_turn(self.addresses("ready")):
            mine = Address(address.identity, address.losses, owner)
            if not _move(self.root / "ready" / address.ready, self.root / "claimed" / mine.claimed):
                self.misses += 1
                if self.misses == until:
                    return
                continue
            # Gone when it was recovered between the rename and the read: another has it.
            message = self._read(self.root / "claimed" / mine.claimed, mine)
            if message is not None:
                yield Claim(self.root, mine, message)

    def read(self, address: Address) -> R | None:
        """A ready message, for a spool with a single reader. None when it is gone, or corrupt and buried."""
        return self._read(self.root / "ready" / address.ready, address)

    def remove(self, address: Address) -> None:
        """Drop a ready message that the single reader has dealt with."""
        path = self.root / "ready" / address.ready
        with atomic.storage(path):
            path.unlink(missing_ok=True)

    def recover(self, is_lost: Callable[[Address], bool], max_losses: int) -> list[Address]:
        """Put back lost claims, or bury those lost too often. Only the coordinator calls this."""
        moved = []
        for address in self.addresses("claimed"):
            if not is_lost(address):
                continue
            again = Address(address.identity, address.losses + 1)
            state = "ready" if again.losses <= max_losses else "dead"
            if _move(self.root / "claimed" / address.claimed, self.root / state / again.ready):
                log.warning("recovered %s from %s to %s", address.ready, address.owner, state)
                moved.append(address)
        return moved

    def _read(self, path: Path, address: Address) -> R | None:
        try:
            return atomic.get(path, self._record)
        except FileNotFoundError:
            return None
        except CorruptRecord as error:
            log.error("buried %s: %s", address.identity, error)
            _move(path, self.root / "dead" / address.ready)
            return None


def in_turn(ready: Sequence[M]) -> list[M]:
    """The order in which a worker reaches for ready messages: from anywhere among the oldest on."""
    offset = random.randrange(min(len(ready), WINDOW)) if ready else 0
    return [*ready[offset:], *ready[:offset]]


def _move(source: Path, target: Path) -> bool:
    try:
        with atomic.storage(source):
            os.rename(source, target)
    except FileNotFoundError:
        return False  # somebody was faster
    return True
