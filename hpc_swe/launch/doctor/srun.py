"""Probe the nodes of a partition by one job, or this machine where there is no scheduler."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE

from hpc_swe.cluster.processes import completed
from hpc_swe.launch.doctor import nodes, probe
from hpc_swe.launch.doctor.findings import ComputingNeeds, Finding, PartitionNeeds

ANSWER_S = 30.0
KEPT = ("SLURM_CONF", "SLURM_ACCOUNT", "SLURM_QOS", "SLURM_RESERVATION", "SLURM_CONSTRAINT")
READABLE = "create the environment with a python that all nodes have, in a folder that jobs may enter (o+rx)"
IMPORTABLE = "keep checkout and environment on the shared file system, and install there (make setup)"
ALLOWED = "check account, partition and limits, or SLURM_ACCOUNT"
TROUBLES = (
    (r"execve\(\): (\S+: (?:Permission denied|No such file).*)", "python", "a job cannot run ", READABLE),
    (r"(No module named \S+|ImportError: .*)", "python", "a job's python: ", IMPORTABLE),
    (r"Unable to allocate resources: (.*)", "srun", "", ALLOWED),
)


@dataclass(frozen=True)
class ProbeSetup:
    """Say in which folder nodes are probed, by which interpreter, and within what time."""

    folder: Path
    token: str
    """A new random text for each call, at the end of the folder's and the jobs' names."""
    python: str
    sandbox: str
    """The table [sandbox] as JSON, when it runs images; empty checks no image."""
    timeout_s: float
    answer_s: float = ANSWER_S
    """Longest wait for each of scancel, the end of srun after it, and the end of a killed srun."""

    @property
    def job(self) -> str:
        """Return the name of the jobs, by which they are cancelled."""
        return f"hpc_swe-doctor-{self.token}"

    @property
    def command(self) -> list[str]:
        options = ["--wait", str(self.timeout_s / 2), "--sandbox", self.sandbox]
        return [self.python, "-m", "hpc_swe.launch.doctor.probe", str(self.folder), self.token, *options]


@dataclass(frozen=True)
class SrunResult:
    """Hold the output of an srun that has ended."""

    text: str
    errors: str
    timed_out: bool = False


def probe_partition(need: PartitionNeeds, setup: ProbeSetup) -> Iterator[Finding]:
    """Probe a partition's nodes; yield the findings about them, and why some did not answer."""
    yield from make_folder(setup)
    result = srun(need, setup)
    probes = probe.read(result.text)
    if len(probes) < need.nodes:
        yield missing_answers(need, setup, result, len(probes))
    if probes:
        yield from nodes.findings(need, probes, setup.sandbox)


def probe_this_machine(setup: ProbeSetup, computing: tuple[ComputingNeeds, ...] = ()) -> Iterator[Finding]:
    """Probe this machine, outside any job, on which learner and engines are to compute."""
    yield from make_folder(setup)
    probes = [probe.measure(setup.folder, setup.token, ANSWER_S, setup.sandbox)]
    yield from nodes.findings(PartitionNeeds(computing=computing), probes, setup.sandbox)


def make_folder(setup: ProbeSetup) -> list[Finding]:
    """Make the folder in which nodes meet; return a finding when that is not possible."""
    try:
        setup.folder.mkdir(parents=True)
        (setup.folder / probe.TOKEN).write_text(setup.token)
    except OSError as error:
        remedy = "with --shared name a folder that you can write"
        says = f"{error.filename}: {error.strerror}"
        return [Finding("shared folder", "fault", says, remedy, "this machine")]
    return []


def srun(need: PartitionNeeds, setup: ProbeSetup) -> SrunResult:
    """Run one job; cancel it by its name if it exceeds the deadline."""
    command = ["srun", f"--partition={need.partition}", f"--job-name={setup.job}", f"--nodes={need.nodes}"]
    command += ["--ntasks-per-node=1", f"--mem={need.memory_mb}M", *need.options]
    command += [f"--time={round(setup.timeout_s / 60) + 2}", *[f"--gres=gpu:{need.gpus}"] * bool(need.gpus)]
    command += setup.command
    # Inside a job, srun would otherwise use that job's nodes.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key in KEPT}
    # Not as a context: its end would wait for the end of srun without a limit.
    job = subprocess.Popen(command, env=kept, text=True, start_new_session=True, stdout=PIPE, stderr=PIPE)
    try:
        return SrunResult(*job.communicate(timeout=setup.timeout_s))
    except subprocess.TimeoutExpired:
        text, errors = _cancel(job, setup)
        return SrunResult(text, errors, timed_out=True)
    except KeyboardInterrupt:
        _cancel(job, setup)
        raise


def _cancel(job: "subprocess.Popen[str]", setup: ProbeSetup) -> tuple[str, str]:
    """Cancel the job and end srun; return what it has printed, perhaps before its end."""
    cancel = ["scancel", f"--name={setup.job}"]
    try:
        completed(subprocess.Popen(cancel, stdout=DEVNULL, stderr=DEVNULL), setup.answer_s)
        return job.communicate(timeout=setup.answer_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    try:
        return job.communicate(timeout=setup.answer_s)
    except subprocess.TimeoutExpired as late:  # a process of another session may hold the pipes
        return _text(late.stdout), _text(late.stderr)


def _text(printed: bytes | str | None) -> str:
    """Return what a command printed before a timeout: bytes, also where it was started with `text`."""
    return printed.decode(errors="replace") if isinstance(printed, bytes) else printed or ""


def missing_answers(need: PartitionNeeds, setup: ProbeSetup, result: SrunResult, answers: int) -> Finding:
    """Explain why fewer nodes answered than were probed."""
    where = f"partition {need.partition}"
    if result.timed_out and "has been allocated" not in result.errors and "queued and" in result.errors:
        says = f"{need.nodes} nodes were not free within {setup.timeout_s:.0f} s: they are not checked"
        remedy = "try again when nodes are free, or with a larger --timeout"
        return Finding("nodes", "warning", says, remedy, where)
    count = f"{answers} of {need.nodes} nodes answered"
    for pattern, check, prefix, remedy in TROUBLES:
        if found := re.search(pattern, result.errors):
            return Finding(check, "fault", f"{count}: {prefix}{found[1]}", remedy, where)
    late = f" in {setup.timeout_s:.0f} s" if result.timed_out else ""
    lines = result.errors.strip().splitlines()
    last = next((line for line in lines if "error:" in line), lines[-1] if lines else "srun printed nothing")
    remedy = "check the missing node (sinfo -R), or use a larger --timeout for slow nodes"
    return Finding("nodes", "fault", f"{count}{late}: {last}", remedy, where)
