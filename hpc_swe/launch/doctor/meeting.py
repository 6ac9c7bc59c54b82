"""Measure what nodes see of each other through the shared folder: names and ports.

Node 0 exchanges pings with each other node. It renames a file into the folder; the other node answers with a
rename as soon as a listing shows the file. Half of the round trip is the time until a rename becomes visible.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from hpc_swe.base.errors import DeadlineError
from hpc_swe.base.records import Record
from hpc_swe.cluster.processes import free_port

ROUNDS = 5
CONNECT_S = 5.0
SLOW_S = 4.0  # after a round slower than this, one more round is enough
HELLO, DONE = "hello", "done"


class Peer(Record, frozen=True, kw_only=True):
    """Hold what a node found out about another node; an empty text means that all is well."""

    host: str
    unseen: str = ""
    """Which file of it did not appear in time."""
    port: str = ""
    """Why its TCP port could not be reached."""
    visible_ms: float = 0.0
    """Time until a rename of one node shows in a listing of the other; 0 is not measured."""


def reason(check: Callable[[], object]) -> str:
    """Return why a check fails, in the system's words; empty when it passes."""
    try:
        check()
    except OSError as error:
        return error.strerror or str(error)
    return ""


class Room:
    """Exchange messages with other nodes in a folder; names in its listing are the messages."""

    def __init__(self, folder: Path, rank: int, deadline: float) -> None:
        self._folder, self._rank, self._deadline = folder, rank, deadline

    def show(self, name: str) -> None:
        """Send a message: rename an empty file to this name."""
        hidden = self._folder / f".{name}"
        hidden.touch()
        os.rename(hidden, self._folder / name)

    def await_name(self, prefix: str) -> str:
        """Wait until a listing shows a name with this prefix; return its rest, or raise DeadlineError."""
        started = time.monotonic()
        while True:
            for name in os.listdir(self._folder):
                if name.startswith(prefix):
                    return name.removeprefix(prefix)
            if time.monotonic() > self._deadline:
                waited = time.monotonic() - started
                raise DeadlineError(f"node {self._rank} saw no {prefix}* in {waited:.0f} s")
            time.sleep(max(0.002, (time.monotonic() - started) / 20))


def attend(folder: Path, rank: int, nodes: int, wait_s: float) -> list[Peer]:
    """Meet the other nodes and return what was found out about each; waits end after `wait_s` in total."""
    if nodes < 2:
        return []
    room = Room(folder, rank, time.monotonic() + wait_s)
    with socket.create_server(("", free_port()), backlog=nodes) as server:
        room.show(f"{HELLO}-{rank}-{server.getsockname()[1]}-{socket.gethostname()}")
        others = [other for other in range(nodes) if other != rank]
        peers = [_meet(room, rank, other) for other in others]
        room.show(f"{DONE}-{rank}-")
        # The others need this node's port until they are done, or until the time is over.
        with contextlib.suppress(DeadlineError):
            for other in (other for other, peer in zip(others, peers, strict=True) if not peer.unseen):
                room.await_name(f"{DONE}-{other}-")
    return peers


def _meet(room: Room, rank: int, other: int) -> Peer:
    host = f"node {other}"
    try:
        port, _, host = room.await_name(f"{HELLO}-{other}-").partition("-")
        address = host, int(port)
        closed = reason(lambda: socket.create_connection(address, CONNECT_S).close())
        peer = Peer(host=host, port=closed)
        if rank == 0:
            return msgspec.structs.replace(peer, visible_ms=_ping_ms(room, other))
        if other == 0:
            _answer_pings(room, rank)
    except DeadlineError as error:
        return Peer(host=host, unseen=str(error))
    return peer


def _ping_ms(room: Room, other: int) -> float:
    """Return half of the median round trip in ms."""
    trips_s: list[float] = []
    for number in range(ROUNDS):
        is_last = number == ROUNDS - 1 or any(trip_s > SLOW_S for trip_s in trips_s)
        started = time.perf_counter()
        room.show(f"ping-{other}-{number}-{'last' if is_last else 'more'}")
        room.await_name(f"pong-{other}-{number}-")
        trips_s.append(time.perf_counter() - started)
        if is_last:
            break
    return sorted(trips_s)[len(trips_s) // 2] * 1e3 / 2


def _answer_pings(room: Room, rank: int) -> None:
    for number in range(ROUNDS):
        word = room.await_name(f"ping-{rank}-{number}-")
        room.show(f"pong-{rank}-{number}-")
        if word == "last":
            return
