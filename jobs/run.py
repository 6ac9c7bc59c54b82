"""python -m jobs.run ROLE RUN [--while PID:START]: keeps the processes of one job alive.

Exit ends the process, not the job: a child that dies is started again, with back-off, at most
`max_restarts` times without a quiet spell. The learner's ranks on this node are one gang: when one
dies all are ended and started again, since a collective cannot go on with a hole. A child never
outlives this process.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from hpc_swe import launch
from hpc_swe.config import RunConfig
from hpc_swe.errors import HpcSweError, StorageError
from hpc_swe.processes import die_with_parent, start_time
from hpc_swe.rundir import RunDir

MISTAKES = (2, 3)  # exit codes of ConfigError and ProtocolError: starting again mends nothing
QUIET_S = 300.0  # a child that lived this long has earned its restarts back
GRACE_S = 20.0

log = logging.getLogger(__name__)


class Gang:
    """The processes of one role on this node: `size` times the same command."""

    def __init__(self, command: Sequence[str], size: int, bound_to: str = "") -> None:
        """`bound_to` names a process, as pid:start time, with which the gang ends; empty is none."""
        self._command, self._size, self._bound_to = command, size, bound_to
        self._children: list[subprocess.Popen[bytes]] = []
        self.stopping = False

    def start(self) -> None:
        """Start all ranks; they find one another at a fresh port of this host."""
        port = _free_port()
        for rank in range(self._size):
            env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            env |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self._size))
            self._children.append(subprocess.Popen(self._command, env=env, preexec_fn=die_with_parent))

    def wait(self) -> int:
        """Until all ranks are done (0) or one has failed (its code; the others are ended)."""
        while True:
            codes = [child.poll() for child in self._children]
            failed = [code for code in codes if code]
            if failed or all(code == 0 for code in codes):
                self._end()
                return failed[0] if failed else 0
            if self._is_abandoned() and not self.stopping:
                self.forward(signal.SIGTERM, None)
                self._end()
                return 0
            time.sleep(0.1)

    def forward(self, number: int, _: FrameType | None) -> None:
        """Pass a signal of the scheduler on; the children drain."""
        self.stopping = True
        for child in self._children:
            child.send_signal(number)

    def _is_abandoned(self) -> bool:
        pid, _, started = self._bound_to.partition(":")
        return bool(pid) and start_time(int(pid)) != started

    def _end(self) -> None:
        for child in self._children:
            child.terminate()
        deadline = time.monotonic() + (GRACE_S if self.stopping else 1.0)
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children.clear()


def size(role: str, config: RunConfig) -> int:
    """Processes of a role's job on one node."""
    return config.policy.tensor_parallel * config.learner.data_parallel if role == "learner" else 1


def keep(gang: Gang, run: RunDir, max_restarts: int, refused_s: float = 60.0) -> int:
    """Start the gang again until it is done, told to stop, at fault or out of restarts; the exit code.

    What the file system refused counts as no restart, but `refused_s` are waited.
    """
    restarts = code = 0
    while not gang.stopping:  # a signal may also come between two starts
        began = time.monotonic()
        gang.start()
        code = gang.wait()
        if code == 0 or code in MISTAKES or gang.stopping or run.stop.exists() or run.finished.exists():
            break
        if code == StorageError.exit_code:
            log.warning("the file system refused; start again in %g s", refused_s)
            time.sleep(refused_s)
            continue
        restarts = 0 if time.monotonic() - began > QUIET_S else restarts + 1
        if restarts > max_restarts:
            log.error("gave up after %d restarts; last exit code %d", max_restarts, code)
            return 1
        log.warning("exit code %d; start again, %d of %d", code, restarts, max_restarts)
        time.sleep(min(2.0 ** (restarts - 1), 60.0))
    return max(code, 0)


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    role, run = arguments[0], RunDir(Path(arguments[1]))
    bound_to = arguments[3] if len(arguments) == 4 else ""
    try:
        config = launch.load(run)
    except HpcSweError as error:
        log.error("%s", error)
        return error.exit_code
    gang = Gang([sys.executable, "-m", f"jobs.{role}", str(run.root)], size(role, config), bound_to)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, gang.forward)
    return keep(gang, run, config.max_restarts)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
