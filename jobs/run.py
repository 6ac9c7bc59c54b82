"""Keep the processes of one job alive: python -m jobs.run ROLE RUN.

A child that dies is started again, with back-off, at most `max_restarts` times; a child that ran for
`QUIET_S` resets the count. A child that is stopped, or shows no sign of life, counts as dead. One that makes
no progress is restarted when a verdict names it (jobs/supervision.py). The learner's ranks form a group: when
one dies, all are ended and started again, since a collective needs all. A child never outlives this process.

SIGUSR2 is the scheduler's warning that the job is about to end: the children drain, and the job asks to be
queued again. SIGTERM is a person's order to end: the children give their claims back and end.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hpc_swe.base import cli
from hpc_swe.base.errors import HpcSweError, NodeError, StorageError, StuckRun
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, orders, submissions, weights
from hpc_swe.cluster import gpu_turns, gpus, scratch
from hpc_swe.cluster.executors.base import own_address, own_job_id
from hpc_swe.cluster.processes import MEETING, Flag, die_with_parent, free_port, start_time
from hpc_swe.config import job_counts
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import existing
from jobs import heartbeat, stacks
from jobs.supervision import VerdictReader

PERMANENT = (2, 3)  # exit codes of ConfigError and ProtocolError: a restart does not help
REASONS = (*PERMANENT, StorageError.exit_code, NodeError.exit_code)  # others may come from a lost rank
FROZEN = 8  # exit code of a process group with a frozen rank
STUCK = 9  # exit code of a process group that makes no progress; verdicts count the restarts
QUIET_S = 300.0  # after so long without a failure, restarts are counted from 0 again
GRACE_S = 20.0
KILLED_S = 180.0  # the longest end of a killed child: a large one frees its memory of host and GPU
KILLED = "killed: process %d of the job, by signal %d (%s); 9 is often a lack of memory, see the kernel's log"
LOST_S = 5.0  # wait for the other ranks when one has failed: one of them may exit with the reason
NOTICE_S = 3600.0  # seconds from a warning to the end when --notice does not give them
WAIT_S = 30  # ranks end together; without a limit srun would wait for ever for a rank whose node was reset
SHARE = 0.75  # of the notice, for draining; the rest is for giving back claims and for the scheduler

Child = subprocess.Popen[bytes]

log = logging.getLogger(__name__)


class ProcessGroup:
    """Run the processes of one job: one command each, or one srun that starts the same on several nodes."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        bound_to: str = "",
        notice_s: float = NOTICE_S,
        shared: Path | None = None,
        verdicts: VerdictReader | None = None,
    ) -> None:
        """Bind its life to the process `bound_to`, given as pid:start time, unless it is empty.

        Ranks write their signs of life below `shared` on several nodes, and in a node-local folder on one.
        """
        self._commands, self._bound_to, self._notice_s = commands, bound_to, notice_s
        self._shared, self._verdicts = shared, verdicts
        self._children, self._signals = list[Child](), list[int]()
        self._until = float("inf")
        self.stopping = Flag()
        """It is set once a signal has asked the process group to end."""
        self.report: Callable[[int], None] = lambda code: None  # after a failure, before the next start
        self.is_warned = False
        self.lasting = 0
        """So many of the last commands are engines that share the GPUs of the others."""
        self.may_last: Callable[[], bool] = lambda: True
        """Return whether the engines go on when the others are done; they end, too, if it returns False."""
        self._is_trained = False
        """The others are done, so that only the engines are started again."""

    def start(self) -> None:
        """Start all ranks; those of one node meet in a folder, others at a port of the job's first node."""
        if not self.stopping.is_set():
            self._until = float("inf")  # forget the deadline of the previous start
        self._folder = self._make_meeting()
        self._monitor = heartbeat.HeartbeatMonitor(self._folder)
        meeting = {MEETING: str(self._folder)}
        if nodes() > 1:
            meeting |= {"MASTER_ADDR": own_address(), "MASTER_PORT": str(free_port())}
            self._spawn(_srun(len(self._commands), self._commands[0]), meeting)
            return
        size = len(self._commands) - self.lasting
        for rank, command in enumerate(self._commands):
            if rank < size and self._is_trained:
                continue
            ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            ranks |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
            self._spawn(command, meeting | ranks)

    def wait(self) -> int:
        """Wait until all ranks are done (return 0) or one has failed (end the others, return its code)."""
        while True:
            codes = self._poll()
            failed = [code for code in codes if code]
            if failed or all(code == 0 for code in codes):
                code = self._reason(failed[0]) if failed else 0
                self._end()
                return code
            living = [child.pid for child in self._children if child.poll() is None]
            if stuck_code := self._obey(living):
                return stuck_code
            if frozen := self._monitor.frozen(living):
                log.error("%s; ending all", frozen)
                self._end()
                return FROZEN
            if is_late := time.monotonic() > self._until:
                log.warning("not done in time; ending")
            if is_late or not self._goes_on(codes):
                self._end()
                return 0
            if self._is_abandoned() and not self.stopping.is_set():
                self.forward(signal.SIGTERM, None)
                self._end()
                return 0
            time.sleep(0.1)

    def _poll(self) -> list[int | None]:
        """Pass on the signals that have come, and return the exit code of each child, None while it runs."""
        while self._signals:
            number = self._signals.pop(0)
            for child in self._children:
                child.send_signal(number)
        return [child.poll() for child in self._children]

    def _goes_on(self, codes: Sequence[int | None]) -> bool:
        """Return whether the children go on of which some are done; ranks that may wait get a deadline.

        They may wait for ever for their leader, or for a rank that a signal ended before it met the others.
        Engines go on alone once training is over, but not beside a learner that ended for another reason.
        """
        leading = codes[: len(codes) - self.lasting]
        if None in leading:
            if 0 in (leading if self.stopping.is_set() else leading[:1]):
                self._until = min(self._until, time.monotonic() + GRACE_S)
            return True
        self._is_trained = self._is_trained or self.stopping.is_set() or self.may_last()
        if not self._is_trained:
            log.warning("the learner ended before the last step, so its engines end, too")
        return self._is_trained

    def _obey(self, living: Sequence[int]) -> int:
        """End the children if a verdict names one, or if they outlive the run; return the code, else 0."""
        if self._verdicts and (verdict := self._verdicts.about(living)):
            self._verdicts.write_stacks(verdict, self._folder)
            self._end(lose=True)
            self._verdicts.record(verdict)
            return StuckRun.exit_code if verdict.gave_up else STUCK
        if self._verdicts and self._verdicts.is_run_over:
            log.error("stuck after the end of the run:\n%s", stacks.collect(living, self._folder))
            self._end()
            return STUCK
        return 0

    def forward(self, number: int, _: FrameType | None) -> None:
        """Have `wait` forward a signal, also to a child that is starting; SIGUSR2 makes them drain."""
        self.stopping.set()
        if number == signal.SIGUSR2:
            self.is_warned = True
            self._until = min(self._until, time.monotonic() + SHARE * self._notice_s)
        self._signals.append(number)

    def _make_meeting(self) -> Path:
        if nodes() == 1 or self._shared is None:
            return scratch.make()
        folder = self._shared / f"{own_job_id()}-{os.urandom(4).hex()}"
        with atomic.storage(folder):
            folder.mkdir(parents=True, mode=0o700)
        return folder

    def _spawn(self, command: Sequence[str], env: dict[str, str]) -> None:
        self._children.append(subprocess.Popen(command, env=os.environ | env, preexec_fn=die_with_parent))

    def _is_abandoned(self) -> bool:
        pid, _, started = self._bound_to.partition(":")
        return bool(pid) and start_time(int(pid)) != started

    def _reason(self, code: int) -> int:
        """Return the exit code that tells the cause: a rank that lost another one may end before that one."""
        deadline = time.monotonic() + LOST_S
        while True:
            codes = self._poll()
            reasons = [each for each in (code, *codes) if each in REASONS]
            if reasons or None not in codes or time.monotonic() > deadline:
                for number, signalled in [(n, -each) for n, each in enumerate(codes) if each and each < 0]:
                    log.error(KILLED, number, signalled, signal.strsignal(signalled))
                return reasons[0] if reasons else code
            time.sleep(0.1)

    def _end(self, *, lose: bool = False) -> None:
        """End the children; those that `lose` their claims give none back, so that each counts as a loss.

        A claim that makes its workers hang must not come back for ever. The processes of other nodes are
        always asked first, through srun.
        """
        for child in self._children:
            child.kill() if lose and nodes() == 1 else child.terminate()
        try:
            await_end(self._children, GRACE_S if self.stopping.is_set() else 1.0)
        finally:
            self._children.clear()
            shutil.rmtree(self._folder, ignore_errors=True)


def await_end(children: Sequence[Child], grace_s: float, killed_s: float = KILLED_S) -> None:
    """Wait until children end, and kill those that take longer than `grace_s`.

    Raise NodeError when one does not end then: it waits inside the kernel for a device or a file system, so
    only another node helps. It runs no further instruction, and its job is better over than waiting for it.
    """
    for wait_s in (grace_s, killed_s):
        deadline, left = time.monotonic() + wait_s, []
        for child in children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                left.append(child)
        children = left
    if children:
        stuck = ", ".join(f"{child.pid} {stacks.state(child.pid)}" for child in children)
        raise NodeError(f"{socket.gethostname()}: killed processes do not end within {killed_s:g} s: {stuck}")


def nodes() -> int:
    """Count the nodes of this job."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


def commands(run: RunDir, role: str, config: RunConfig) -> list[list[str]]:
    """Return the command of each process of a role's job; supervisors of engines come last."""
    python, folder = [sys.executable, "-P", "-m"], str(run.root)
    engines = [[*python, "jobs.inference", folder]] * job_counts.engines_beside(role, config)
    size = job_counts.gpus("inference", config)
    if job_counts.is_hybrid(config) and size is not None:  # an engine of unknown size sees all GPUs
        visible = gpus.usable(os.environ) if size else []
        engines = [
            ["env", f"{gpus.VISIBLE}={','.join(visible[index * size : (index + 1) * size])}", *each]
            for index, each in enumerate(engines)
        ]
    return [[*python, f"jobs.{role}", folder]] * job_counts.processes(role, config) + engines


def supervise(group: ProcessGroup, run: RunDir, max_restarts: int, refused_s: float = 60.0) -> int:
    """Restart a group until it is done, must stop, fails for good or has no restart left; return its code.

    A refusal of the file system does not count as a restart; the next start comes `refused_s` later. A node
    that cannot do the work ends the job, since the next job may get another.
    """
    restarts = code = 0
    while not group.stopping.is_set():  # a signal may also come between two starts
        began = time.monotonic()
        group.start()
        code = group.wait()
        if code in (0, *PERMANENT, NodeError.exit_code) or group.stopping.is_set() or orders.is_over(run):
            break
        if code == STUCK:
            continue
        pause_s, why = refused_s, "the file system refused"
        if code != StorageError.exit_code:
            restarts = 0 if time.monotonic() - began > QUIET_S else restarts + 1
            if restarts > max_restarts:
                log.error("gave up after %d restarts; last exit code %d", max_restarts, code)
                return 1
            pause_s, why = min(2.0 ** (restarts - 1), 60.0), f"exit code {code}, {restarts} of {max_restarts}"
        log.warning("%s; start again in %g s", why, pause_s)
        group.report(code)
        due = time.monotonic() + pause_s
        while time.monotonic() < due and not group.stopping.wait(min(pause_s, 5.0)):
            if orders.is_over(run):
                return 0
    return max(code, 0)


@cli.command
def main() -> int:
    """Run one job of a run from the command line; return the exit code."""
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    arguments = cli.parse(_parser())
    run = RunDir(arguments.run.absolute())
    try:
        config = existing.load(run, trains=True)
        existing.enter(run)
        return _work(arguments, run, config)
    except HpcSweError as error:
        log.error("%s", error)
        _report(arguments, run, 0.0, error.exit_code)  # so that ticks and people learn the reason
        return error.exit_code


def _work(arguments: argparse.Namespace, run: RunDir, config: RunConfig) -> int:
    role, number = arguments.role, arguments.submission
    if number and run.marked(role, number, submissions.VOID).exists():
        log.info("void: another submission has taken the place of %s %d", role, number)
        return 0
    verdicts = VerdictReader(run, role, config, nodes() == 1)
    wanted = commands(run, role, config)
    group = ProcessGroup(wanted, arguments.bound_to, arguments.notice, run.meetings, verdicts)
    for signalled in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(signalled, group.forward)
    began, group.report = time.monotonic(), lambda code: _report(arguments, run, -1.0, code)
    _report(arguments, run, -1.0, 0)
    try:
        _require_gpus(role, config)
        with _sharing(group, run, role, config):
            code = supervise(group, run, config.max_restarts)
    except NodeError as error:
        log.error("%s", error)
        code = error.exit_code
    _report(arguments, run, time.monotonic() - began, code)
    if group.is_warned and not orders.active(run):
        config.executor.requeue()
    return code


@contextmanager
def _sharing(group: ProcessGroup, run: RunDir, role: str, config: RunConfig) -> Iterator[None]:
    if not job_counts.is_hybrid(config) or role != "learner":
        yield
        return

    def is_trained() -> bool:
        newest = weights.newest(run)
        return bool(orders.active(run)) or (newest is not None and newest.step >= config.steps)

    group.lasting, group.may_last = job_counts.engines_beside(role, config), is_trained
    os.environ[gpu_turns.FOLDER] = str(folder := scratch.make())
    try:
        yield
    finally:
        scratch.remove(folder)


def _require_gpus(role: str, config: RunConfig) -> None:
    """Check that the node has the role's GPUs; hide all GPUs from a role that is configured for the CPU."""
    if (needed := job_counts.gpus(role, config)) == 0:
        os.environ[gpus.VISIBLE] = ""
    elif needed:
        gpus.require(role, needed // nodes(), os.environ)


def _report(arguments: argparse.Namespace, run: RunDir, seconds: float, code: int) -> None:
    if not arguments.submission:  # a person started it
        return
    started = submissions.Started(
        job=own_job_id(),
        host=socket.gethostname(),
        pid=os.getpid(),
        start_time=start_time(os.getpid()) or "",
        restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        at=time.time(),
        seconds=seconds,
        code=code,
    )
    index = int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
    try:
        atomic.put(run.started(arguments.role, arguments.submission, index), started)
    except (StorageError, FileNotFoundError) as error:  # the folder may be no run any more
        log.warning("not reported: %s", error)  # only people and the next tick read it, so the job continues


def _srun(processes: int, command: Sequence[str]) -> list[str]:
    """Build the srun command of some ranks; -K1 ends all when one fails, which is not srun's default."""
    cores = os.environ.get("SLURM_CPUS_PER_TASK", "1")  # srun does not read the variable
    options = ["-K1", f"--wait={WAIT_S}", "--unbuffered", f"--ntasks={processes}", f"--cpus-per-task={cores}"]
    options += ["--overlap"]  # a step whose node was reset keeps its resources until the job's end
    options += ["--export=ALL"]  # else ranks would miss our variables where sites set SBATCH_EXPORT=NONE
    return ["srun", *options, *command]


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("jobs.run", "Keep the processes of one job of a run alive.", "rollout runs/mine")
    parser.add_argument("role", help="coordinator, inference, learner, rollout or reward")
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--submission", type=int, default=0, help="number in launch/ROLE/; 0 is by hand")
    notice = "time between the scheduler's warning and the end"
    parser.add_argument("--notice", metavar="SECONDS", type=float, default=NOTICE_S, help=notice)
    bound = "end when this process has ended"
    parser.add_argument("--while", dest="bound_to", metavar="PID:START", default="", help=bound)
    return parser


if __name__ == "__main__":
    main()
