"""Pass messages between roles through a spool: a folder in which a message's subfolder is its state.

    ready/      <identity>~<redeliveries>            published, waiting for a worker
    claimed/    <identity>~<redeliveries>~<owner>    one worker has it
    dead/       <identity>~<redeliveries>            lost too often or corrupt, kept for a person to look at

Every change of state is one rename(2) inside one file system, which is atomic: a reader never sees half a
message, and of two workers that claim the same one, exactly one gets it. There are no locks. A finished
message is unlinked. A worker that dies leaves its claim; `recover` puts it back and counts one more loss.
"""

import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from hpc_swe.base.errors import CorruptRecord, StorageError
from hpc_swe.base.records import Record
from hpc_swe.base.store import atomic

R = TypeVar("R", bound=Record)
M = TypeVar("M")
STATES = ("ready", "claimed", "dead")
NAME = re.compile(r"([^~]+)~(0|[1-9][0-9]{0,3})(?:~([^~]+))?")
MAX_NAME_BYTES = 205  # of a name in ready/; the rest of 255 is for the owner's name or a temporary suffix
WINDOW = 32  # a claim starts anywhere among so many oldest, so that two workers seldom try the same message
TRIES = 3
PATIENCE_S = 300.0  # a message that alone cannot be read for so long counts as lost
ALONE_S = 1800.0  # after it one that cannot be read is moved to dead/ even if no other was read

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Hold the parts of a message's file name."""

    identity: str
    redeliveries: int
    owner: str = ""

    @classmethod
    def parse(cls, name: str) -> "Address | None":
        """Parse a file name; None for a foreign file, which must not be touched."""
        parts = NAME.fullmatch(name)
        if parts is None or len(os.fsencode(f"{parts[1]}~{parts[2]}")) > MAX_NAME_BYTES:
            return None
        return cls(parts[1], int(parts[2]), parts[3] or "")

    @property
    def ready(self) -> str:
        """Return the name in ready/ and dead/."""
        return f"{self.identity}~{self.redeliveries}"

    @property
    def claimed(self) -> str:
        """Return the name in claimed/."""
        return f"{self.ready}~{self.owner}"


@dataclass(frozen=True)
class Claim(Generic[R]):
    """Hold a message for this process alone, until the process finishes it, gives it back or dies."""

    root: Path
    address: Address
    message: R

    @property
    def name(self) -> str:
        """Return the message's identity, by which results are named."""
        return self.address.identity

    @property
    def path(self) -> Path:
        """Return the path of the claim's file."""
        return self.root / "claimed" / self.address.claimed

    def finish(self) -> bool:
        """Remove the message; publish its result first. Return False when the claim was lost meanwhile."""
        try:
            with atomic.storage(self.path):
                os.unlink(self.path)
        except FileNotFoundError:
            log.warning("lost claim %s", self.name)
            return False
        return True

    def give_back(self) -> bool:
        """Return the message to ready/ without counting a loss; False when the claim was lost meanwhile."""
        return _move(self.path, self.root / "ready" / self.address.ready)


class Spool(Generic[R]):
    """Read and write the messages of one record type in one folder."""

    def __init__(self, root: Path, record: type[R]) -> None:
        self.root = root
        self._record = record
        self.misses = 0
        """Claims that another worker took first, so far."""
        self._reads = 0
        """Messages that this process has claimed and read, so far."""
        self._refused: dict[str, tuple[float, int]] = {}
        """Identity -> when the message could not be read first, and the reads by then."""

    def put(self, name: str, message: R) -> None:
        """Publish a result under its identity, unless there is one: then the first stays.

        A process that was declared dead may publish late, when the reader has already counted the first.
        """
        path = self.root / "ready" / Address(name, 0).ready
        try:
            atomic.write_new(path, atomic.encode(path, message))
        except FileExistsError:
            log.warning("dropped a second result of %s: the first lies in %s", name, path.parent)

    def overwrite(self, name: str, message: R) -> None:
        """Publish a request under its identity; an older copy of the same request is replaced."""
        atomic.put(self.root / "ready" / Address(name, 0).ready, message)

    def addresses(self, state: str) -> list[Address]:
        """List the messages in one state: evaluations first, then by age, which is how identities sort."""
        found = (Address.parse(name) for name in atomic.names(self.root / state))
        return [address for address in found if address and bool(address.owner) == (state == "claimed")]

    def claims(self, owner: str) -> Iterator[Claim[R]]:
        """Claim messages from one listing, as many as the caller takes from the iterator.

        Raise StorageError when the file system refuses some of them, and no other one was read.
        """
        until, reads, errors = self.misses + TRIES, self._reads, list[StorageError]()
        for address in rotated(self.addresses("ready")):
            if self.misses == until or len(errors) == TRIES:
                break
            try:
                claim = self._claim(address, Address(address.identity, address.redeliveries, owner))
            except StorageError as error:
                errors.append(error)
                continue
            if claim is not None:
                yield claim
        if errors and self._reads == reads:
            raise errors[0]

    def read(self, address: Address) -> R | None:
        """Read a ready message of a spool with a single reader; None when it is gone or corrupt."""
        return self._read(self.root / "ready" / address.ready, address)

    def move_to_dead(self, address: Address) -> None:
        """Move a ready message to dead/, for a person to look at; only the coordinator calls this."""
        _move(self.root / "ready" / address.ready, self.root / "dead" / address.ready)

    def is_readable(self, address: Address) -> bool:
        """Return whether a ready message can be read, or is not there any more."""
        try:
            atomic.read(self.root / "ready" / address.ready)
        except FileNotFoundError:
            return True
        except (StorageError, CorruptRecord) as error:
            log.error("unreadable %s: %s", address.identity, error)
            return False
        return True

    def remove(self, address: Address) -> None:
        """Remove a ready message that the single reader has finished."""
        path = self.root / "ready" / address.ready
        with atomic.storage(path):
            path.unlink(missing_ok=True)

    def recover(self, is_lost: Callable[[Address], bool], max_losses: int) -> list[Address]:
        """Return lost claims to ready/, or to dead/ when lost too often. Only the coordinator calls this."""
        moved = []
        for address in self.addresses("claimed"):
            if not is_lost(address):
                continue
            again = Address(address.identity, address.redeliveries + 1)
            state = "ready" if again.redeliveries <= max_losses else "dead"
            if _move(self.root / "claimed" / address.claimed, self.root / state / again.ready):
                log.warning("recovered %s from %s to %s", address.ready, address.owner, state)
                moved.append(address)
        return moved

    def _claim(self, address: Address, mine: Address) -> Claim[R] | None:
        """Claim and read one message; None when another worker has it, or it is corrupt or lost."""
        ready, claimed = self.root / "ready" / address.ready, self.root / "claimed" / mine.claimed
        if not _move(ready, claimed):
            self.misses += 1
            return None
        try:
            message = self._read(claimed, mine)  # None, too, when it was recovered before it was read
        except StorageError as error:
            if not self._counts_as_lost(mine.identity):
                _move(claimed, ready)  # nobody would know of the claim, and it would count as a loss
                raise
            log.error("left %s to be counted as lost: %s", mine.identity, error)
            return None
        if message is None:
            return None
        self._reads += 1
        self._refused.pop(mine.identity, None)
        return Claim(self.root, mine, message)

    def _counts_as_lost(self, identity: str) -> bool:
        """Note that a message cannot be read; return whether others were for PATIENCE_S, and it was not."""
        since, reads = self._refused.setdefault(identity, (time.monotonic(), self._reads))
        if self._reads == reads or time.monotonic() - since < PATIENCE_S:
            return False
        del self._refused[identity]
        return True

    def _read(self, path: Path, address: Address) -> R | None:
        try:
            return atomic.get(path, self._record)
        except FileNotFoundError:
            return None
        except CorruptRecord as error:
            log.error("dead letter %s: %s", address.identity, error)
            _move(path, self.root / "dead" / address.ready)
            return None


def rotated(ready: Sequence[M]) -> list[M]:
    """Return the order in which a worker tries ready messages: from a random one of the oldest onward."""
    offset = random.randrange(min(len(ready), WINDOW)) if ready else 0
    return [*ready[offset:], *ready[:offset]]


def _move(source: Path, target: Path) -> bool:
    try:
        with atomic.storage(source):
            os.rename(source, target)
    except FileNotFoundError:
        return False  # another process was faster
    return True
