"""Run jobs on a Slurm cluster. submitit writes the batch scripts and calls sbatch, and nothing more.

A job's name is `<role>:<run id>` and its comment is the submission's number. So one `squeue` finds all jobs
of a run without their ids, which a controller that loses its state assigns again. All jobs ask to be
requeued; those that are warned of their end requeue themselves.
"""

import contextlib
import io
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from subprocess import PIPE
from typing import Annotated, Any, ClassVar, get_args

import msgspec
from msgspec import Meta

from hpc_swe.base.errors import ConfigError, SchedulerError
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Role, RunManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.cluster import gpus
from hpc_swe.cluster.executors import _sbatch_options as sbatch_options
from hpc_swe.cluster.executors import base
from hpc_swe.cluster.executors._sbatch_options import Options
from hpc_swe.cluster.executors.base import (
    SINGLETON_ROLES,
    Executor,
    GpuGrant,
    Job,
    MemoryGrant,
    ResourceRequest,
    Submission,
)
from hpc_swe.cluster.processes import completed

TIMEOUT, TIMED_OUT = ("timeout", "--kill-after=5"), (124, -9)  # a command, and its codes when time is up
ENDED = (
    *("COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
)
NOT_IN_PATHS = ("%", "\\", "\n")
# Reasons of jobs that wait for a person.
HELD = ("JobHeldUser", "JobHeldAdmin", "PartitionConfig", "BadConstraints", "InvalidAccount", "InvalidQOS")
BROKEN = ("launch failed requeued held", "DependencyNeverSatisfied")
UNANSWERED = (
    *("Unable to contact", "timed out", "Zero Bytes were transmitted or received", "in standby mode"),
    *("Connection refused", "Connection reset", "Communication connection failure"),
    *("Message send failure", "Message receive failure"),
    *("Invalid authentication credential", "Protocol authentication error"),
)
"""Errors of sbatch that pass, and after which Slurm may have accepted the job all the same."""
FILTERS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SLURM_CLUSTERS")
QUEUE_FORMAT = "%i|%k|%T|%r|%j"

log = logging.getLogger(__name__)


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe the resources of one job of a role."""

    partition: str = ""
    """Slurm partition; empty is the executor's."""
    nodes: Annotated[int, Meta(gt=0)] = 1
    """Nodes of the job. Only the learner uses several; its processes are divided among them."""
    cpus_per_task: Annotated[int, Meta(gt=0)] = 2
    """Cores of each process."""
    mem_gb: Annotated[float, Meta(gt=0)] = 4.0
    """Memory of the job on each node."""
    gpus_per_node: Annotated[int, Meta(ge=0)] = 0
    """GPUs of the job on each node."""
    gpu_gib: Annotated[float, Meta(ge=0)] = 0.0
    """Memory of each GPU, in GiB: a start is refused whose estimate is above it. `python -m hpc_swe.doctor`
    prints what nodes have; 0 is unknown, and nothing is compared."""
    timeout_min: Annotated[int, Meta(gt=0)] = 24 * 60
    """Walltime in minutes."""
    options: Options = {}
    """Further options of sbatch, for example gres = "gpu:h100:4" in place of gpus_per_node. They override the
    executor's; false or "" leaves an option out."""


class Slurm(Plugin, Executor, frozen=True, kw_only=True):
    """Submit one array of jobs per submission; the coordinator and the learner are singletons."""

    is_here: ClassVar[bool] = False
    pause_s: ClassVar[float] = 15.0
    array_size: ClassVar[int] = 1000  # below MaxArraySize, which is 1001 unless a cluster says otherwise
    answer_s: ClassVar[float] = 120.0  # that each of Slurm's commands may take
    partition: str = ""
    """Slurm partition of all roles that name none; empty is the cluster's default."""
    account: str = ""
    """Slurm account; empty is the cluster's default."""
    cluster: str = ""
    """Cluster of a Slurm with several; empty is that of the host, whatever $SLURM_CLUSTERS says."""
    options: Options = {}
    """Further options of sbatch for all jobs, for example qos = "long"."""
    notice_s: Annotated[int, Meta(ge=0)] = 120
    """Seconds before its walltime at which a job is warned: more than a step and a checkpoint take."""
    roles: dict[Role, Resources] = {}
    """Resources of the jobs of each role."""
    setup: list[str] = []
    """Lines of bash that each job runs first, for example "module load cuda"; one that fails ends the job."""
    runtime: str = ""
    """File of containers/build_runtime.sh, from which jobs run; empty: from the environment of the start."""
    environ: dict[str, str] = {}
    """Environment variables of each job. Never a secret: the run folder and the batch scripts store them."""

    def __post_init__(self) -> None:
        base.check_environ(self.environ)
        sbatch_options.check(self.options, "options")
        for role, resources in self.roles.items():
            sbatch_options.check(resources.options, f"roles.{role}.options")

    def check(self, submission: Submission) -> None:
        """Check that the walltime leaves room for the notice, and that processes divide among nodes."""
        base.check_runtime(self.runtime)
        role, resources = submission.role, self._resources(submission.role)
        if resources.timeout_min * 60 < self.notice_s + 90:
            raise ConfigError(
                f"[executor] roles.{role}.timeout_min = {resources.timeout_min} is too short for "
                f"notice_s = {self.notice_s}: Slurm counts in whole minutes and warns up to 60 s early"
            )
        if any(mark in word for word in submission.command for mark in NOT_IN_PATHS):
            raise ConfigError(
                "[executor] Slurm gives % and \\ in paths a meaning; name another folder with --run"
            )
        if submission.processes % resources.nodes:
            raise ConfigError(
                f"[executor] roles.{role}.nodes = {resources.nodes} does not divide the "
                f"{submission.processes} processes of {base.LEARNER_PROCESSES}"
            )

    def gpus_per_node(self, role: Role) -> int:
        """Return the GPUs that a job of a role gets on each node: options replace the role's number."""
        own: Options = {"gpus-per-node": self._resources(role).gpus_per_node}
        return gpus.in_options(sbatch_options.merged(own, self._given(role)))

    def gpu_grant(self, role: Role) -> GpuGrant | None:
        """Return the GPUs that a job of a role gets on all its nodes; None where options hide the number."""
        resources, count = self._resources(role), self.gpus_per_node(role)
        if not count and any(option in sbatch_options.UNCOUNTED for option in self._given(role)):
            return None
        nodes = f", on {resources.nodes} nodes," if resources.nodes > 1 else ""
        key = f"roles.{role}.gpus_per_node = {count}{nodes}"
        return GpuGrant(count * resources.nodes, key, resources.gpu_gib)

    def memory_grant(self, role: Role) -> MemoryGrant | None:
        """Return the memory of a job of a role on each node; None where an option of sbatch gives it."""
        resources = self._resources(role)
        if sbatch_options.gives_memory(self._given(role)):
            return None
        key = f"roles.{role}.mem_gb = {resources.mem_gb:g}"
        return MemoryGrant(resources.mem_gb, resources.nodes, key)

    def request(self, role: Role, jobs: int, processes: int) -> ResourceRequest:
        each = self._resources(role)
        return ResourceRequest(
            role=role,
            jobs=jobs,
            nodes=jobs * each.nodes,
            cores=jobs * processes * each.cpus_per_task,
            memory_gb=jobs * each.nodes * each.mem_gb,
            gpus=jobs * each.nodes * self.gpus_per_node(role),
            hours=each.timeout_min / 60,
        )

    def script(self, run: RunDir, submission: Submission) -> str:
        """Return the batch script; this works where there is no Slurm, too."""
        from submitit.slurm import slurm

        parameters = self._parameters(run, submission)
        folder, command = run.logs(submission.role), self._command(submission)
        return str(slurm._make_sbatch_string(command=command, folder=folder, **parameters))

    def submit(self, run: RunDir, submission: Submission) -> str:
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError

        if SlurmExecutor.affinity() < 0:
            raise ConfigError("[executor] type = 'slurm': no srun on PATH; submit from a login node")
        run.logs(submission.role).mkdir(parents=True, exist_ok=True)
        executor = SlurmExecutor(folder=run.logs(submission.role))
        sbatch = executor._make_submission_command
        # A job that is submitted from a job would take that one's variables for its own. SBATCH_ACCOUNT and
        # the like stay: with them a person sets options for all jobs.
        foreign = (*base.JOB_VARIABLES, "SBATCH_CLUSTERS")
        inside = [name for name in os.environ if name.startswith(foreign) and name != "SLURM_CONF"]
        prefix = ["env", *(f"--unset={name}" for name in inside), *TIMEOUT, f"{self.answer_s:g}"]
        executor._make_submission_command = lambda script: [*prefix, *sbatch(script)]
        executor.update_parameters(**self._parameters(run, submission))
        started = time.monotonic()
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what the error says again
                job = executor._submit_command(self._command(submission))
        except FailedJobError as error:
            cause = error.__cause__
            code = cause.returncode if isinstance(cause, subprocess.CalledProcessError) else 1
            if code in TIMED_OUT and time.monotonic() - started >= self.answer_s:
                raise self._timed_out("sbatch") from None
            if code < 0:  # Slurm may have accepted the job all the same
                raise SchedulerError(f"sbatch: killed by signal {-code}") from None
            raise _refusal(str(error)) from None
        return str(job.job_id)

    def queue(self, run: RunDir) -> list[Job]:
        """List the run's jobs with one squeue for all jobs of the user who owns it."""
        # --all: partitions may be hidden, and jobs that are not listed would be submitted again
        owner = run.root.stat().st_uid
        whose = "--me" if owner == os.getuid() else f"--user={owner}"  # of a run that a group may read
        words = (whose, "--all", "--array", "--noheader", f"--format={QUEUE_FORMAT}")
        listing = self._call("squeue", *self._of_cluster(), *words)
        return parse_queue(listing, atomic.get(run.manifest, RunManifest).run_id)

    def endings(self, jobs: Sequence[str]) -> Mapping[str, str] | None:
        """Ask sacct how jobs ended; return None when the cluster has no accounting or it does not answer."""
        if not jobs:
            return {}
        words = ("--allocations", "--noheader", "--parsable2", "--format=JobID,State,ExitCode,NodeList")
        try:
            listing = self._call("sacct", *self._of_cluster(), *words, f"--jobs={','.join(jobs)}")
        except SchedulerError as error:
            log.warning("no endings: %s", error)
            return None
        rows = [line.split("|") for line in listing.splitlines()]
        return {row[0].partition("_")[0]: " ".join(row[1:]) for row in rows}

    def cancel(self, jobs: Sequence[str]) -> None:
        if jobs:
            self._call("scancel", *self._of_cluster(), *jobs)

    def requeue(self) -> None:
        """Ask Slurm to requeue this job.

        Slurm then ends this step with SIGTERM, which must not interrupt the request itself.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            self._call("scontrol", "requeue", base.own_job_id())
        except SchedulerError as error:
            log.warning("not requeued, the next tick submits another: %s", error)

    def _call(self, *command: str) -> str:
        """Run one of Slurm's commands and return its output; raise SchedulerError if none comes in time."""
        try:
            # without SQUEUE_STATES, SLURM_CLUSTERS and the like, with which a person filters what is shown
            env = {name: value for name, value in os.environ.items() if not name.startswith(FILTERS)}
            options: Any = {"stdout": PIPE, "stderr": PIPE, "text": True, "errors": "replace", "env": env}
            done = completed(subprocess.Popen(command, **options), self.answer_s)
        except subprocess.TimeoutExpired:
            raise self._timed_out(command[0]) from None
        except OSError as error:
            raise SchedulerError(f"{command[0]}: {error}") from None
        if done.returncode:
            raise SchedulerError(
                f"{command[0]}: {' '.join(done.stderr.split()) or f'exit {done.returncode}'}"
            )
        return str(done.stdout)

    def _timed_out(self, command: str) -> SchedulerError:
        return SchedulerError(f"{command}: no answer in {self.answer_s:g} s")

    def _resources(self, role: Role) -> Resources:
        return self.roles.get(role, Resources())

    def _given(self, role: Role) -> Options:
        """Return the options that people gave for a role's jobs."""
        return sbatch_options.named(self.options) | sbatch_options.named(self._resources(role).options)

    def _of_cluster(self) -> list[str]:
        return [f"--clusters={self.cluster}"] if self.cluster else []

    def _command(self, submission: Submission) -> str:
        # The script ends in exec: Slurm signals the batch shell, so jobs.run must take its place.
        # Until Python has installed its handler, the warning is ignored: it must not kill the job.
        notice = ["--notice", str(self.notice_s)]
        lines = base.job_script(submission, self.setup, self.environ, notice, self.runtime)
        return "\n".join(["trap '' USR2", *lines])

    def _parameters(self, run: RunDir, submission: Submission) -> dict[str, Any]:
        resources = self._resources(submission.role)
        return {
            "job_name": f"{submission.role}:{submission.run_id}",
            "comment": str(submission.number),
            "time": resources.timeout_min,
            "nodes": resources.nodes,
            "ntasks_per_node": submission.processes // resources.nodes,
            "cpus_per_task": resources.cpus_per_task,
            "stderr_to_stdout": True,
            "use_srun": False,
            "wckey": None,
            "additional_parameters": self._options(run, submission),
        }

    def _options(self, run: RunDir, submission: Submission) -> Options:
        role, resources = submission.role, self._resources(submission.role)
        output = "%j.log" if role in SINGLETON_ROLES else "%A_%a.log"
        is_single = role in SINGLETON_ROLES
        own: Options = {
            "signal": f"B:USR2@{self.notice_s}",
            "requeue": True,
            "output": str(run.logs(role) / output),
            "partition": resources.partition or self.partition,
            "account": self.account,
            "clusters": self.cluster,
            "mem": f"{round(resources.mem_gb * 1024)}M",
            "gpus-per-node": resources.gpus_per_node or "",
            "dependency": "singleton" if is_single else "",
            "array": "" if is_single else f"0-{submission.count - 1}",
        }
        return sbatch_options.merged(own, self._given(role))


def parse_queue(listing: str, run_id: str) -> list[Job]:
    """Read the jobs of a run from the output of squeue in the format QUEUE_FORMAT.

    Example:
        >>> parse_queue("17_3|2|PENDING|Priority|rollout:demo-a1b2c3", "demo-a1b2c3")
        [Job(role='rollout', job='17_3', submission=2, state='waiting', reason='Priority')]
    """
    found = []
    for line in listing.splitlines():
        words = line.split("|", 4)  # other jobs may have fewer: people write line breaks into comments
        role = _role(words[-1], run_id)
        if len(words) == 5 and role and words[2] not in ENDED:
            job, comment, state, reason, _ = words
            number = int(comment) if comment.isdecimal() else 0
            found.append(Job(role, job, number, _state(state, reason), reason))
    return found


def _role(name: str, run_id: str) -> Role | None:
    """Return the role that a job's name says; older code submitted jobs whose names end in it."""
    return next((r for r in get_args(Role) if name in (f"{r}:{run_id}", f"{run_id}:{r}")), None)


def _state(state: str, reason: str) -> Any:
    if reason.replace("_", " ") in BROKEN:
        return "broken"
    if state in ("REQUEUE_HOLD", "SPECIAL_EXIT") or reason in HELD:
        return "held"
    return "waiting" if state == "PENDING" else "running"


def _refusal(output: str) -> ConfigError | SchedulerError:
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()[-1:]
    message = "; ".join(lines)
    if any(words in output for words in UNANSWERED):
        return SchedulerError(f"sbatch got no clear answer: {message}")
    return ConfigError(f"sbatch refuses it: {message}; see [executor] partition, account, options and roles")
