"""Kill a process before each of its file system calls in turn, refuse them, and count them.

The interpreter itself reports the calls (`sys.addaudithook`), whoever makes them; only fsync has no such
report and is wrapped. Death is `os._exit`: no clean-up runs, as with SIGKILL.
"""

import multiprocessing as mp
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from tests.kit.waiting import DEADLINE_S

FORK = mp.get_context("fork")
EVENTS = {"open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir"}
DIED = 77


def at_every_call(
    folder: Path, setup: Callable[[Path], object], action: Callable[[Path], object]
) -> Iterator[Path]:
    """For n = 0, 1, ..: a fresh folder in which `action` died before its n-th call; last, one it survived."""
    for n in count():
        root = folder / f"{n:03d}"
        root.mkdir()
        setup(root)
        exitcode = in_child(_dying, root, action, n)
        assert exitcode in (0, DIED), f"call {n}: exit {exitcode}"
        yield root
        if exitcode == 0:
            return


def calls(root: Path, action: Callable[[Path], object]) -> Counter[str]:
    """How often `action` makes each file system call below `root`; "create" is an open that writes."""
    receiver, sender = FORK.Pipe(duplex=False)
    assert in_child(_counting, root, action, sender) == 0
    tally: Counter[str] = receiver.recv()
    return tally


def in_child(target: Callable[..., object], *args: Any) -> int:
    child = FORK.Process(target=target, args=args)
    child.start()
    child.join(DEADLINE_S)
    assert child.exitcode is not None, "hangs"
    return child.exitcode


def _dying(root: Path, action: Callable[[Path], object], fatal: int) -> None:
    ticket = count()

    def die(*_: str) -> None:
        if next(ticket) == fatal:
            os._exit(DIED)

    _report(root, die)
    action(root)
    os._exit(0)  # what the interpreter does at its end is none of the action's calls


def _counting(root: Path, action: Callable[[Path], object], sender: Any) -> None:
    tally: Counter[str] = Counter()

    def add(call: str, _: str) -> None:
        tally[call] += 1

    _report(root, add)
    action(root)
    sender.send(tally.copy())


def refuse(root: Path, code: Callable[[str, str], int]) -> None:
    """Let calls below `root` fail from now on, in this process, which cannot take that back.

    `code` gets the call and its path, and returns the number of the error, or 0.
    """

    def fail(call: str, path: str) -> None:
        if number := code(call, path):
            raise OSError(number, os.strerror(number), path)

    _report(root, fail)


def _report(root: Path, on_call: Callable[[str, str], None]) -> None:
    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in EVENTS:
            return
        if event in ("open", "os.listdir") and not str(args[0]).startswith(str(root)):
            return  # an import's, say
        if event == "open":
            writes = args[2] & (os.O_WRONLY | os.O_RDWR)
            event = "create" if writes else "open"
        on_call(event, str(args[0]))

    fsync = os.fsync

    def reported_fsync(fd: int) -> None:
        on_call("fsync", str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    sys.addaudithook(hook)
    os.fsync = reported_fsync
