"""A grading in a process of its own, for an episode whose grading was lost before.

A lost claim does not say whom to blame. The node may have gone, or the submission may have killed or frozen
the process that graded it; then the next worker would be lost too, and in the end the episode would have no
reward. So the next worker only watches a child that grades. If the child dies or shows no sign of life while
the worker lives on, the submission did it and is unresolved. What ends the job or the node ends the worker
as well, and no verdict is made.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from hpc_swe.errors import SandboxError, boundary
from hpc_swe.plugins.graders._again import settled
from hpc_swe.plugins.graders.base import GRADER_BROKE
from hpc_swe.processes import MEETING, Flag, die_with_parent
from hpc_swe.records import Episode, Score

BEAT_S = 2.0
LOOK_S = 1.0
WAIT_S = 900.0
"""Longest wait for others to be done, before a child that may have died for want of memory is tried again."""
_OURS = range(2, 10)
"""Exit codes of our errors (errors.py); none of these is the submission's doing."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SilenceLimits:
    """With a child."""

    silent: int = 120
    """Looks without a sign of life. A worker that was frozen itself did not look."""
    leave_s: float = 10.0
    """What ends a whole job takes no longer until it ends the worker too."""


def watch(
    command: Sequence[str],
    episode: Episode,
    unresolved_reward: float,
    limits: SilenceLimits = SilenceLimits(),
) -> Score:
    """The score of an episode, by a command that runs `answer`.

    Raises:
        SandboxError: The child ended by an error that names the host or the configuration.
    """
    found = settled(lambda: _watch(command, episode, limits), lambda _: False, WAIT_S)
    if isinstance(found, Score):
        return found
    log.error("grading alone of %s: its process %s", episode.request.name, found)
    detail = f"{GRADER_BROKE}: its own process {found}, after a worker was lost over it"
    return Score(outcome="unresolved", reward=unresolved_reward, detail=detail)


def answer(judge: Callable[[Episode], Score]) -> None:
    """In the child: judge the episode of the standard input, and show signs of life meanwhile.

    The worker says when to end, by its own end: the scheduler's signals are not for the child.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # a handler, which programs started here do not inherit
    told = os.dup(1)
    os.dup2(2, 1)  # what else is printed is no part of the answer
    episode = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Episode)
    done = Flag()
    beats = threading.Thread(target=_beat, args=(told, done), name="beats", daemon=True)
    os.write(told, b".")
    beats.start()
    score = judge(episode)
    done.set()
    beats.join()
    with os.fdopen(told, "wb") as file:
        file.write(b"\n" + msgspec.json.encode(score))


def _beat(file: int, done: Flag) -> None:
    while not done.wait(BEAT_S):
        os.write(file, b".")


def _watch(command: Sequence[str], episode: Episode, limits: SilenceLimits) -> Score | str:
    """The child's score, or what became of it. Its output is a dot a beat, then a line end and the score."""
    environment = {name: value for name, value in os.environ.items() if name != MEETING}
    with boundary(SandboxError, "start a grading alone"), tempfile.TemporaryFile() as given:
        given.write(msgspec.msgpack.encode(episode))
        given.seek(0)
        child = subprocess.Popen(
            command, stdin=given, stdout=subprocess.PIPE, env=environment, preexec_fn=die_with_parent
        )
    assert child.stdout is not None
    with child, child.stdout:
        told, looks, look = b"", 0, select.poll()
        look.register(child.stdout, select.POLLIN)
        while looks < limits.silent:
            if not look.poll(LOOK_S * 1000):
                looks += 1
            elif data := os.read(child.stdout.fileno(), 1 << 16):
                told, looks = told + data, 0
            else:
                break
        is_frozen = looks == limits.silent
        if is_frozen:
            child.kill()
        code = child.wait()
    state = f"showed no sign of life for {looks * LOOK_S:g} s" if is_frozen else f"ended with code {code}"
    if code == 0:
        return msgspec.json.decode(told.partition(b"\n")[2], type=Score)
    if not told or code in _OURS:
        raise SandboxError(f"a grading alone of {episode.request.name} {state}; the worker's log says why")
    time.sleep(limits.leave_s)
    return state
