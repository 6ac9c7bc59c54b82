"""python -m jobs.run ROLE RUN: keeps the processes of one job alive.

Exit ends the process, not the job: a child that dies is started again, with back-off, at most
`max_restarts` times without a quiet spell. The learner's ranks are one gang: when one dies all are ended
and started again, since a collective cannot go on with a hole. A child that is stopped, or shows no sign of
life, counts as dead. A child never outlives this process.

USR2 is the scheduler's warning that the job is about to end: the children drain, and the job asks to be
queued again. TERM is somebody's wish that it end: the children give back what they hold, and that is all.
"""

import argparse
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from hpc_swe import cli, gpus, job_counts, scratch
from hpc_swe.errors import HpcSweError, NodeError, StorageError
from hpc_swe.plugins.executors.base import own_address, own_job_id
from hpc_swe.processes import MEETING, Flag, die_with_parent, free_port, start_time
from hpc_swe.records import RunManifest
from hpc_swe.rundir import RunDir
from hpc_swe.runs import existing
from hpc_swe.settings import RunConfig
from hpc_swe.store import atomic, orders, submissions
from hpc_swe.store.submissions import Started
from jobs import heart

MISTAKES = (2, 3)  # exit codes of ConfigError and ProtocolError: starting again mends nothing
REASONS = (*MISTAKES, StorageError.exit_code)  # all others may be those of a rank that lost another
FROZEN = 8  # exit code of a gang with a frozen rank
QUIET_S = 300.0  # a child that lived this long has earned its restarts back
GRACE_S = 20.0
LOST_S = 5.0  # for the ranks that are left when one has failed, which may be about to say why
NOTICE_S = 3600.0  # how long a warned gang may take when nobody says
WAIT_S = 30  # ranks end together; for one whose node was reset srun would wait for ever
SHARE = 0.75  # of the notice; the rest is for giving back and for the scheduler

log = logging.getLogger(__name__)


class Gang:
    """The processes of one job: a command for each, or one srun that spreads the same over several nodes."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        bound_to: str = "",
        notice_s: float = NOTICE_S,
        shared: Path | None = None,
    ) -> None:
        """`bound_to` names a process, as pid:start time, with which the gang ends; empty is none.

        Ranks of several nodes show below `shared` that they are alive, those of one node in a folder there.
        """
        self._commands, self._bound_to, self._notice_s = commands, bound_to, notice_s
        self._shared = shared
        self._children: list[subprocess.Popen[bytes]] = []
        self._until = float("inf")
        self._stopping = Flag()
        self.is_warned = False

    @property
    def stopping(self) -> bool:
        """Whether it was told to end."""
        return self._stopping.is_set()

    def rest(self, seconds: float) -> None:
        """Wait, but no longer than until it is told to end."""
        self._stopping.wait(seconds)

    def start(self) -> None:
        """Start all ranks; those of one node meet in a folder, others at a port of a job's first node."""
        if not self.stopping:
            self._until = float("inf")  # of the start before
        self._place = self._meeting()
        self._hearts = heart.Watch(self._place)
        meeting = {MEETING: str(self._place)}
        if nodes() > 1:
            meeting |= {"MASTER_ADDR": own_address(), "MASTER_PORT": str(free_port())}
            self._spawn(_srun(len(self._commands), self._commands[0]), meeting)
            return
        for rank, command in enumerate(self._commands):
            place = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(self._commands)))
            self._spawn(command, meeting | place)

    def wait(self) -> int:
        """Until all ranks are done (0) or one has failed (its code; the others are ended)."""
        while True:
            codes = [child.poll() for child in self._children]
            failed = [code for code in codes if code]
            if failed or all(code == 0 for code in codes):
                code = self._reason(failed[0]) if failed else 0
                self._end()
                return code
            if frozen := self._hearts.frozen([c.pid for c in self._children if c.poll() is None]):
                log.error("%s; ending all", frozen)
                self._end()
                return FROZEN
            if codes[0] == 0:  # who is left has lost its leader
                self._until = min(self._until, time.monotonic() + GRACE_S)
            if time.monotonic() > self._until:
                log.warning("not done in time; ending")
                self._end()
                return 0
            if self._is_abandoned() and not self.stopping:
                self.forward(signal.SIGTERM, None)
                self._end()
                return 0
            time.sleep(0.1)

    def forward(self, number: int, _: FrameType | None) -> None:
        """Pass a signal of the scheduler on; the children drain."""
        self._stopping.set()
        if number == signal.SIGUSR2:
            self.is_warned = True
            self._until = min(self._until, time.monotonic() + SHARE * self._notice_s)
        for child in self._children:
            child.send_signal(number)

    def _meeting(self) -> Path:
        if nodes() == 1 or self._shared is None:
            return scratch.make()
        place = self._shared / f"{own_job_id()}-{os.urandom(4).hex()}"
        with atomic.storage(place):
            place.mkdir(parents=True, mode=0o700)
        return place

    def _spawn(self, command: Sequence[str], env: dict[str, str]) -> None:
        self._children.append(subprocess.Popen(command, env=os.environ | env, preexec_fn=die_with_parent))

    def _is_abandoned(self) -> bool:
        pid, _, started = self._bound_to.partition(":")
        return bool(pid) and start_time(int(pid)) != started

    def _reason(self, code: int) -> int:
        """Why the gang failed: ranks that only lost another may end before that one has said it."""
        deadline = time.monotonic() + LOST_S
        while True:
            codes = [code, *(child.poll() for child in self._children)]
            said = [each for each in codes if each in REASONS]
            if said or None not in codes or time.monotonic() > deadline:
                return said[0] if said else code
            time.sleep(0.1)

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
        shutil.rmtree(self._place, ignore_errors=True)


def nodes() -> int:
    """Nodes of this job."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


def commands(run: RunDir, role: str, config: RunConfig) -> list[list[str]]:
    """One for each process of a role's job.

    An engine that somebody else runs needs a supervisor, but no node: that one goes with the coordinator.
    """
    roles = [role] * job_counts.processes(role, config)
    if role == "coordinator" and config.inference.url and "inference" in job_counts.desired(config):
        roles.append("inference")
    return [[sys.executable, "-P", "-m", f"jobs.{each}", str(run.root)] for each in roles]


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
            gang.rest(refused_s)
            continue
        restarts = 0 if time.monotonic() - began > QUIET_S else restarts + 1
        if restarts > max_restarts:
            log.error("gave up after %d restarts; last exit code %d", max_restarts, code)
            return 1
        log.warning("exit code %d; start again, %d of %d", code, restarts, max_restarts)
        gang.rest(min(2.0 ** (restarts - 1), 60.0))
    return max(code, 0)


@cli.command
def main() -> int:
    """The command line."""
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    arguments = cli.parse(_parser())
    run = RunDir(arguments.run.absolute())
    try:
        config = existing.load(run)
        os.chdir(atomic.get(run.manifest, RunManifest).folder)
        return _work(arguments, run, config)
    except HpcSweError as error:
        log.error("%s", error)
        return error.exit_code


def _work(arguments: argparse.Namespace, run: RunDir, config: RunConfig) -> int:
    role, number = arguments.role, arguments.submission
    if number and submissions.is_void(run, role, number):
        log.info("void: another submission has taken the place of %s %d", role, number)
        return 0
    gang = Gang(commands(run, role, config), arguments.bound_to, arguments.notice, run.meetings)
    for signalled in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(signalled, gang.forward)
    began = time.monotonic()
    _show(arguments, run, -1.0, 0)
    try:
        _require_gpus(role, config)
        code = keep(gang, run, config.max_restarts)
    except NodeError as error:
        log.error("%s", error)
        code = error.exit_code
    _show(arguments, run, time.monotonic() - began, code)
    if gang.is_warned and not orders.active(run):
        config.executor.requeue()
    return code


def _require_gpus(role: str, config: RunConfig) -> None:
    """Neither train on the CPU where GPUs are meant, nor on a GPU where the CPU is.

    Raises:
        NodeError: This node has too few GPUs.
    """
    needed = job_counts.gpus(role, config)
    if needed == 0:
        os.environ[gpus.VISIBLE] = ""
    elif needed:
        gpus.require(role, needed // nodes(), os.environ)


def _show(arguments: argparse.Namespace, run: RunDir, seconds: float, code: int) -> None:
    if not arguments.submission:  # started by hand
        return
    pid = os.getpid()
    started = Started(
        job=own_job_id(),
        host=socket.gethostname(),
        pid=pid,
        start_time=start_time(pid) or "",
        restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        at=time.time(),
        seconds=seconds,
        code=code,
    )
    index = int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
    try:
        submissions.report(run, arguments.role, arguments.submission, index, started)
    except StorageError as error:
        log.warning("not noted: %s", error)  # for people and for the next tick; the work goes on


def _srun(processes: int, command: Sequence[str]) -> list[str]:
    """One process a GPU or share; -K1 ends all when one fails, which srun alone would not."""
    cores = os.environ.get("SLURM_CPUS_PER_TASK", "1")  # srun does not read it
    words = ["-K1", f"--wait={WAIT_S}", "--unbuffered", f"--ntasks={processes}", f"--cpus-per-task={cores}"]
    words += ["--overlap"]  # a step whose node was reset holds its share until the job's end
    return ["srun", *words, *command]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jobs.run", description="Keep one job of a run alive.")
    parser.add_argument("role", help="coordinator, inference, learner, rollout or reward")
    parser.add_argument("run", type=Path)
    parser.add_argument("--submission", type=int, default=0, help="number in launch/<role>/; 0 is by hand")
    parser.add_argument("--notice", type=float, default=NOTICE_S, help="seconds from warning to end")
    parser.add_argument("--while", dest="bound_to", default="", help="pid:start of a process to end with")
    return parser


if __name__ == "__main__":
    main()
