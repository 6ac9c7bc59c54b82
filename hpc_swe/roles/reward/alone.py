"""Grade an episode in a process of its own after a worker was lost while grading it.

A lost claim does not tell the cause. The node may have failed, or the patch may have killed or frozen the
process that graded it; then each further worker would be lost too, and in the end the episode would have no
reward. So the next worker only watches a child that grades. If the child dies or shows no sign of life while
the worker lives on, the patch is to blame, and the episode is unresolved. Whatever ends the job or the node
ends the worker as well, and then no score is made.
"""

import logging
import math
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
from functools import partial

import msgspec

from hpc_swe.base.errors import SandboxError, boundary
from hpc_swe.base.records import Episode, Score
from hpc_swe.cluster.processes import MEETING, Flag, die_with_parent
from hpc_swe.tasks.graders.base import GRADER_BROKE
from hpc_swe.tasks.second_run import oom_kills, run_reliably

BEAT_S = 2.0
PROGRESS = b"+"
LOOK_S = 1.0
SILENT = 120
"""Successive looks without a sign of life. Looks count, so that a worker that was frozen counts none."""
LEAVE_S = 10.0
"""Wait after a child's end before the patch is blamed: what ends the whole job ends the worker within it."""
END_S = 60.0
"""Longest wait for the end of a child that has closed its output, and of one that was killed."""
WAIT_S = 900.0
"""Longest wait for other gradings to end before a child that may have lacked memory is tried again."""
_OWN_EXIT_CODES = range(2, 10)
"""Exit codes of our own errors (errors.py), which a patch cannot cause."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """Say how long a child may go without a sign of life, and a living one without progress."""

    silent: int = SILENT
    """Looks without a sign of life."""
    hung_s: float = math.inf
    """Seconds without a sandbox that is opened or closed."""
    leave_s: float = LEAVE_S
    end_s: float = END_S
    progressed: Callable[[], None] = lambda: None
    """Is called when the child has made progress."""
    killed: Callable[[], int] = oom_kills
    """Counts the processes that the kernel has killed for memory."""


class _Hung(Exception):
    """The child made no progress: a lack of memory is not the reason, so it is not tried again."""


def watch(command: Sequence[str], episode: Episode, unresolved_reward: float, patience: Patience) -> Score:
    """Grade an episode by a command that runs `answer`, and watch it.

    Raise SandboxError if the child ended with an error of the host or the configuration, or if the host does
    not let it end.
    """
    try:
        attempt = partial(_watch, command, episode, patience)
        found = run_reliably(attempt, lambda _: False, WAIT_S, patience.killed)
    except _Hung as hung:
        found = str(hung)
    if isinstance(found, Score):
        return found
    log.error("grading alone of %s: its process %s", episode.request.name, found)
    detail = f"{GRADER_BROKE}: its own process {found}, after a worker was lost over it"
    return Score(outcome="unresolved", reward=unresolved_reward, detail=detail)


def answer(judge: Callable[[Episode], Score], steps: Callable[[], int]) -> None:
    """Judge the episode of the standard input in the child, and write signs of life meanwhile.

    `steps` counts what the judge has done so far; a sign differs while the count grows.

    The child ends with the worker and ignores the scheduler's signals, which are meant for the worker.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # a handler, which programs started here do not inherit
    output = os.dup(1)
    os.dup2(2, 1)  # other prints must not mix with the answer
    episode = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Episode)
    done = Flag()
    beats = threading.Thread(target=_beat, args=(output, done, steps), name="beats", daemon=True)
    os.write(output, b".")
    beats.start()
    score = judge(episode)
    done.set()
    beats.join()
    with os.fdopen(output, "wb") as file:
        file.write(b"\n" + msgspec.json.encode(score))


def _beat(file: int, done: Flag, steps: Callable[[], int]) -> None:
    before = 0
    while not done.wait(BEAT_S):
        now = steps()
        os.write(file, b"." if now == before else PROGRESS)
        before = now


def _watch(command: Sequence[str], episode: Episode, patience: Patience) -> Score | str:
    """Return the child's score, or how the child ended.

    It prints a dot per beat, or PROGRESS, then a newline and the score.
    """
    environment = {name: value for name, value in os.environ.items() if name != MEETING}
    with boundary(SandboxError, "start a grading alone"), tempfile.TemporaryFile() as given:
        given.write(msgspec.msgpack.encode(episode))
        given.seek(0)
        child = subprocess.Popen(
            command, stdin=given, stdout=subprocess.PIPE, env=environment, preexec_fn=die_with_parent
        )
    assert child.stdout is not None
    with child.stdout:  # the child as a context would be awaited without a limit
        try:
            output, fault = _read(child.stdout.fileno(), patience)
        except _Hung:
            _end(child, patience.end_s, is_at_fault=True)
            raise
    code = _end(child, patience.end_s, bool(fault))
    state = fault or f"ended with code {code}"
    if code == 0:
        return msgspec.json.decode(output.partition(b"\n")[2], type=Score)
    if not output or code in _OWN_EXIT_CODES:
        raise SandboxError(f"a grading alone of {episode.request.name} {state}; the worker's log says why")
    time.sleep(patience.leave_s)
    return state


def _end(child: "subprocess.Popen[bytes]", end_s: float, is_at_fault: bool) -> int:
    """Return a child's exit code; kill it at once if it is at fault, else if it does not end in time.

    Raise SandboxError if it does not end then: it waits inside the kernel, for which no patch is to blame.
    """
    for is_killed in (True,) if is_at_fault else (False, True):
        if is_killed:
            child.kill()
        try:
            return child.wait(end_s)
        except subprocess.TimeoutExpired:
            continue
    raise SandboxError(
        f"process {child.pid} of a grading alone was killed and did not end within {end_s:g} s: it is left"
    )


def _read(file: int, patience: Patience) -> tuple[bytes, str]:
    """Read what the child prints until its end; return it, and why it must be killed, if so.

    Raise _Hung if it shows signs of life without progress.
    """
    output, looks, still_s, poll = b"", 0, 0.0, select.poll()
    poll.register(file, select.POLLIN)
    while looks < patience.silent:
        began = time.monotonic()
        if not poll.poll(LOOK_S * 1000):
            looks += 1
        elif data := os.read(file, 1 << 16):
            output, looks = output + data, 0
            if PROGRESS in data:
                still_s = 0.0
                patience.progressed()
        else:
            return output, ""
        still_s += min(time.monotonic() - began, 2 * LOOK_S)  # none of the time in which this was frozen
        if still_s >= patience.hung_s:
            raise _Hung(f"made no progress for {still_s:.0f} s")
    return output, f"showed no sign of life for {looks * LOOK_S:g} s"
