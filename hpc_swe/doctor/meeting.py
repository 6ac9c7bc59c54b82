"""What nodes see of each other through the shared folder: names, locks, clocks, ports.

Node 0 plays ball with each other node: it renames a file into sight, the other answers by a rename as
soon as a listing shows it, and the answer's name bears the other's clock. Half of the way there and back
is how long a rename takes to be seen, and no two clocks had to agree for it.
"""

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path

import msgspec

from hpc_swe.errors import DeadlineError
from hpc_swe.records import Record

ROUNDS = 5
CONNECT_S = 5.0
SLOW_S = 4.0  # one more round after one above this tells enough
HELLO, DONE, LOCK = "hello", "done", "lock"


class Peer(Record, frozen=True, kw_only=True):
    """What one node found out about another. Of words, empty is well."""

    host: str
    unseen: str = ""
    """What was awaited of it in vain."""
    port: str = ""
    """Why its TCP port could not be reached."""
    lock: str = ""
    """What is wrong with locks that it holds."""
    visible_ms: float = 0.0
    """Until a rename of one node shows in a listing of the other; 0 is not measured."""
    clock_s: float = 0.0
    """Its clock minus this one's."""


class Room:
    """The folder of one meeting, by listings alone."""

    def __init__(self, folder: Path, rank: int, deadline: float) -> None:
        self._folder, self._rank, self._deadline = folder, rank, deadline

    def show(self, name: str) -> None:
        """Put a name into sight by a rename; what it says is in the name."""
        hidden = self._folder / f".{name}"
        hidden.touch()
        os.rename(hidden, self._folder / name)

    def await_name(self, prefix: str) -> str:
        """What follows a prefix, once a listing shows it.

        Raises:
            DeadlineError: None did in time.
        """
        begun = time.monotonic()
        while True:
            for name in os.listdir(self._folder):
                if name.startswith(prefix):
                    return name.removeprefix(prefix)
            if time.monotonic() > self._deadline:
                waited = time.monotonic() - begun
                raise DeadlineError(f"node {self._rank} saw no {prefix}* in {waited:.0f} s")
            time.sleep(max(0.002, (time.monotonic() - begun) / 20))


def attend(folder: Path, rank: int, nodes: int, wait_s: float) -> list[Peer]:
    """Meet the other nodes; each is waited for at most `wait_s` in all."""
    if nodes < 2:
        return []
    room = Room(folder, rank, time.monotonic() + wait_s)
    with socket.create_server(("", 0), backlog=nodes) as server, (folder / LOCK).open("w") as lock:
        if rank == 0:
            _try_lock(lock.fileno())  # before it greets: the others then try in vain
        room.show(f"{HELLO}-{rank}-{server.getsockname()[1]}-{socket.gethostname()}")
        others = [other for other in range(nodes) if other != rank]
        peers = [_meet(room, rank, other, lock.fileno()) for other in others]
        room.show(f"{DONE}-{rank}-")
        _stay(room, [other for other, peer in zip(others, peers, strict=True) if not peer.unseen])
    return peers


def _meet(room: Room, rank: int, other: int, lock: int) -> Peer:
    host = f"node {other}"
    try:
        port, _, host = room.await_name(f"{HELLO}-{other}-").partition("-")
        outcome = _refused(_try_lock(lock)) if other == 0 else ""
        peer = Peer(host=host, port=_connect(host, int(port)), lock=outcome)
        if rank == 0:
            visible_ms, clock_s = _play(room, other)
            return msgspec.structs.replace(peer, visible_ms=visible_ms, clock_s=clock_s)
        if other == 0:
            _answer(room, rank)
    except DeadlineError as error:
        return Peer(host=host, unseen=str(error))
    return peer


def _try_lock(descriptor: int) -> str:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError as error:
        return error.strerror or str(error)
    return "taken"


def _refused(outcome: str) -> str:
    """What is wrong with a lock that node 0 holds, by what came of trying for it."""
    return {"held": "", "taken": "does nothing: two nodes held it at once"}.get(outcome, outcome)


def _connect(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _play(room: Room, other: int) -> tuple[float, float]:
    """Half of the median way there and back in ms, and the other's clock by the quickest round."""
    rounds: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        last = number == ROUNDS - 1 or any(way_s > SLOW_S for way_s, _ in rounds)
        wall, begun = time.time(), time.perf_counter()
        room.show(f"ping-{other}-{number}-{'last' if last else 'more'}")
        theirs = float(room.await_name(f"pong-{other}-{number}-"))
        way_s = time.perf_counter() - begun
        rounds.append((way_s, theirs - (wall + way_s / 2)))
        if last:
            break
    rounds.sort()
    return rounds[len(rounds) // 2][0] * 1e3 / 2, rounds[0][1]


def _answer(room: Room, rank: int) -> None:
    for number in range(ROUNDS):
        word = room.await_name(f"ping-{rank}-{number}-")
        room.show(f"pong-{rank}-{number}-{time.time():.6f}")
        if word == "last":
            return


def _stay(room: Room, others: list[int]) -> None:
    """Until the others are through with this node's port and lock, or have had their time."""
    with contextlib.suppress(DeadlineError):
        for other in others:
            room.await_name(f"{DONE}-{other}-")
