"""Jobs on a Slurm cluster. submitit writes the batch scripts and calls sbatch, and nothing more.

A job's name is `<run id>:<role>` and its comment the submission's number, so that one `squeue` tells all
about a run without any id: a controller that loses its state gives ids out again. All jobs ask to be
requeued; those that are warned of their end requeue themselves.
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, get_args

import msgspec
from msgspec import Meta

from hpc_swe.errors import ConfigError, SchedulerError
from hpc_swe.plugins import Plugin
from hpc_swe.plugins.executors.base import OF_A_JOB, SINGLE, Job, Submission, require_environ, shell
from hpc_swe.records import Role, RunManifest
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic

WITHIN, LATE = ("timeout", "--kill-after=5"), (124, -9)  # its codes when time was over
ENDED = (
    *("COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
)
UNFIT = ("%", "\\", "\n")
HELD = (
    "JobHeldUser",
    "JobHeldAdmin",
    "PartitionConfig",
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
)  # all wait for a person
BROKEN = ("launch failed requeued held", "DependencyNeverSatisfied")
FILTERS = ("SQUEUE_", "SACCT_", "SCANCEL_")
FIELDS = "%i|%k|%T|%r|%j"
Options = dict[str, str | int | bool]

log = logging.getLogger(__name__)


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one job of a role is given."""

    partition: str = ""
    """Empty is the executor's."""
    nodes: Annotated[int, Meta(gt=0)] = 1
    """Only the learner spreads over several; its processes are divided among them."""
    cpus_per_task: Annotated[int, Meta(gt=0)] = 2
    """Cores of each process."""
    mem_gb: Annotated[float, Meta(gt=0)] = 4.0
    """Memory of the job on each node."""
    gpus_per_node: Annotated[int, Meta(ge=0)] = 0
    timeout_min: Annotated[int, Meta(gt=0)] = 24 * 60
    options: Options = {}
    """Further options of sbatch, for example gres = "gpu:h100:4"; they win over the executor's."""


class Slurm(Plugin, frozen=True, kw_only=True):
    """One array of jobs a submission; the coordinator and the learner are singletons."""

    is_here: ClassVar[bool] = False
    partition: str = ""
    """Empty is the cluster's default."""
    account: str = ""
    """Empty is the cluster's default."""
    options: Options = {}
    """Further options of sbatch for all jobs, for example qos = "long"."""
    notice_s: Annotated[int, Meta(ge=0)] = 120
    """How long before its walltime a job is warned: longer than a step and a checkpoint take."""
    array_size: Annotated[int, Meta(gt=0)] = 1000
    """Most jobs of one array; no more than the cluster's MaxArraySize - 1."""
    roles: dict[Role, Resources] = {}
    """What the jobs of each role are given."""
    setup: list[str] = []
    """Lines of bash that each job runs first, for example "module load cuda"; one that fails ends the job."""
    environ: dict[str, str] = {}
    """Environment variables of each job. Never a secret: the run folder and the batch scripts keep them."""
    pause_s: float = 15.0
    """Seconds between two looks of a command that waits for the run."""
    answer_s: Annotated[float, Meta(gt=0)] = 60.0
    """How long each of Slurm's commands may take."""

    def __post_init__(self) -> None:
        require_environ(self.environ)

    def check(self, submission: Submission) -> None:
        """Whether the walltime leaves room for the notice, and processes divide among nodes."""
        role, resources = submission.role, self._resources(submission.role)
        if resources.timeout_min * 60 < self.notice_s + 90:
            raise ConfigError(
                f"[executor] roles.{role}.timeout_min = {resources.timeout_min} is too short for "
                f"notice_s = {self.notice_s}: Slurm counts in whole minutes and warns up to 60 s early"
            )
        if any(mark in word for word in submission.command for mark in UNFIT):
            raise ConfigError(
                "[executor] Slurm reads % and \\ in paths as signs of its own; name another folder with --run"
            )
        if submission.processes % resources.nodes:
            raise ConfigError(
                f"[executor] roles.{role}.nodes = {resources.nodes} does not divide the "
                f"{submission.processes} processes of policy.tensor_parallel * learner.data_parallel"
            )

    def script(self, run: RunDir, submission: Submission) -> str:
        """The batch script; also where there is no Slurm."""
        from submitit.slurm import slurm

        parameters = self._parameters(run, submission)
        folder, command = run.logs(submission.role), self._command(submission)
        return str(slurm._make_sbatch_string(command=command, folder=folder, **parameters))

    def submit(self, run: RunDir, submission: Submission) -> str:
        """Hand the script to sbatch."""
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError

        if SlurmExecutor.affinity() < 0:
            raise ConfigError("[executor] type = 'slurm': no srun on PATH; submit from a login node")
        run.logs(submission.role).mkdir(parents=True, exist_ok=True)
        executor = SlurmExecutor(folder=run.logs(submission.role))
        sbatch = executor._make_submission_command
        executor._make_submission_command = lambda script: [*WITHIN, f"{self.answer_s:g}", *sbatch(script)]
        executor.update_parameters(**self._parameters(run, submission))
        began = time.monotonic()
        try:
            with _outside_jobs():
                job = executor._submit_command(self._command(submission))
        except FailedJobError as error:
            cause = error.__cause__
            code = cause.returncode if isinstance(cause, subprocess.CalledProcessError) else 1
            if code in LATE and time.monotonic() - began >= self.answer_s:
                raise self._late("sbatch") from None
            if code < 0:  # the job may have been taken all the same
                raise SchedulerError(f"sbatch: killed by signal {-code}") from None
            raise _refusal(submission.role, str(error)) from None
        return str(job.job_id)

    def queue(self, run: RunDir) -> list[Job]:
        """One squeue for all of the user's jobs."""
        # --all: partitions may be hidden, and jobs that are not seen would be submitted again
        listing = self._ask("squeue", "--me", "--all", "--array", "--noheader", f"--format={FIELDS}")
        return parse_queue(listing, atomic.get(run.manifest, RunManifest).run_id)

    def endings(self, jobs: Sequence[str]) -> Mapping[str, str] | None:
        """One sacct; None when the cluster keeps no book or it does not answer."""
        if not jobs:
            return {}
        words = ("--allocations", "--noheader", "--parsable2", "--format=JobID,State,ExitCode,NodeList")
        try:
            listing = self._ask("sacct", *words, f"--jobs={','.join(jobs)}")
        except SchedulerError as error:
            log.warning("no endings: %s", error)
            return None
        rows = [line.split("|") for line in listing.splitlines()]
        return {row[0].partition("_")[0]: " ".join(row[1:]) for row in rows}

    def cancel(self, jobs: Sequence[str]) -> None:
        """One scancel."""
        if jobs:
            self._ask("scancel", *jobs)

    def requeue(self) -> None:
        """Slurm then ends this step with SIGTERM, which must not hit the one who asks."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            self._ask("scontrol", "requeue", own_id())
        except SchedulerError as error:
            log.warning("not requeued, the next tick submits another: %s", error)

    def _ask(self, *command: str) -> str:
        """Output of one of Slurm's commands.

        Raises:
            SchedulerError: It failed, is not there, or did not answer in time.
        """
        try:
            # without SQUEUE_STATES and its kin, by which a person filters what is shown
            env = {name: value for name, value in os.environ.items() if not name.startswith(FILTERS)}
            options: Any = {"capture_output": True, "text": True, "errors": "replace", "env": env}
            done = subprocess.run(command, timeout=self.answer_s, check=False, **options)
        except subprocess.TimeoutExpired:
            raise self._late(command[0]) from None
        except OSError as error:
            raise SchedulerError(f"{command[0]}: {error}") from None
        if done.returncode:
            raise SchedulerError(
                f"{command[0]}: {' '.join(done.stderr.split()) or f'exit {done.returncode}'}"
            )
        return str(done.stdout)

    def _late(self, command: str) -> SchedulerError:
        return SchedulerError(f"{command}: no answer in [executor] answer_s = {self.answer_s:g} s")

    def _resources(self, role: Role) -> Resources:
        return self.roles.get(role, Resources())

    def _command(self, submission: Submission) -> str:
        # exec: the batch shell gets the signals, and must be the one who understands them
        # a warning that comes while Python starts is lost, and must not kill
        notice = ["--notice", str(self.notice_s)]
        return "\n".join(["trap '' USR2", *shell(submission, self.setup, self.environ, notice)])

    def _parameters(self, run: RunDir, submission: Submission) -> dict[str, Any]:
        resources = self._resources(submission.role)
        return {
            "job_name": f"{submission.run_id}:{submission.role}",
            "comment": str(submission.number),
            "time": resources.timeout_min,
            "nodes": resources.nodes,
            "ntasks_per_node": submission.processes // resources.nodes,
            "cpus_per_task": resources.cpus_per_task,
            "mem": f"{round(resources.mem_gb * 1024)}M",
            "stderr_to_stdout": True,
            "use_srun": False,
            "wckey": None,
            "additional_parameters": self._options(run, submission),
        }

    def _options(self, run: RunDir, submission: Submission) -> Options:
        role, resources = submission.role, self._resources(submission.role)
        output = "%j.log" if role in SINGLE else "%A_%a.log"
        options: Options = {
            "signal": f"B:USR2@{self.notice_s}",
            "requeue": True,
            "output": str(run.logs(role) / output),
            "partition": resources.partition or self.partition,
            "account": self.account,
        }
        if resources.gpus_per_node:
            options["gpus-per-node"] = resources.gpus_per_node
        if role in SINGLE:
            options["dependency"] = "singleton"
        else:
            options["array"] = f"0-{submission.count - 1}"
        return (
            {key: value for key, value in options.items() if value != ""} | self.options | resources.options
        )


@contextmanager
def _outside_jobs() -> Iterator[None]:
    """Without what a job finds in its environment: a job that it submits would take it for its own.

    SBATCH_ACCOUNT and its kin stay: those are what a person wants of all jobs.
    """
    inside = {name: value for name, value in os.environ.items() if name.startswith(OF_A_JOB)}
    inside.pop("SLURM_CONF", None)
    for name in inside:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(inside)


def parse_queue(listing: str, run_id: str) -> list[Job]:
    """Jobs of a run among the lines of squeue in the format FIELDS.

    Example:
        >>> parse_queue("17_3|2|PENDING|Priority|demo-a1b2c3:rollout", "demo-a1b2c3")
        [Job(role='rollout', job='17_3', submission=2, state='waiting', reason='Priority')]
    """
    found = []
    for line in listing.splitlines():
        words = line.split("|", 4)  # fewer in jobs that are not ours: people write lines into comments
        owner, _, role = words[-1].rpartition(":")
        if len(words) == 5 and owner == run_id and role in get_args(Role) and words[2] not in ENDED:
            job, comment, state, reason, _ = words
            number = int(comment) if comment.isdecimal() else 0
            found.append(Job(msgspec.convert(role, Role), job, number, _state(state, reason), reason))
    return found


def own_id() -> str:
    """This job as Slurm's commands name it. The bare id of an array's last element means the whole array."""
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array else os.environ["SLURM_JOB_ID"]


def _state(state: str, reason: str) -> Any:
    if reason.replace("_", " ") in BROKEN:
        return "broken"
    if state in ("REQUEUE_HOLD", "SPECIAL_EXIT") or reason in HELD:
        return "held"
    return "waiting" if state == "PENDING" else "running"


def _refusal(role: Role, said: str) -> ConfigError | SchedulerError:
    lines = [line for line in said.splitlines() if "error" in line] or said.splitlines()[-1:]
    message = f"sbatch refuses a job of {role}: {'; '.join(lines)}"
    if "Unable to contact" in said or "timed out" in said:
        return SchedulerError(message)
    return ConfigError(f"{message}; see [executor] partition, account, options and roles.{role}")
