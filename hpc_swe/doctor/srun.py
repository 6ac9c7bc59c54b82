"""One job per partition that probes its nodes, or a probe of this machine where there is no scheduler."""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_swe.doctor import nodes, probe
from hpc_swe.doctor.findings import Ask, Finding

ANSWER_S = 30.0
FREE = ("SLURM_CONF", "SLURM_ACCOUNT", "SLURM_QOS", "SLURM_RESERVATION", "SLURM_CONSTRAINT")
READABLE = "make the environment from a python that all nodes have, in a folder that jobs may enter (o+rx)"
IMPORTABLE = "keep checkout and environment on the shared file system, and install there (make setup)"
TROUBLES = (
    (r"execve\(\): (\S+: (?:Permission denied|No such file).*)", "python", "a job cannot run ", READABLE),
    (r"(No module named \S+|ImportError: .*)", "python", "a job's python: ", IMPORTABLE),
    (
        r"Unable to allocate resources: (.*)",
        "srun",
        "",
        "see account, partition and limits, or SLURM_ACCOUNT",
    ),
)


@dataclass(frozen=True)
class Bench:
    """Where and how nodes are probed."""

    folder: Path
    token: str
    """Drawn anew each time; the folder's and the jobs' names end in it."""
    python: str
    images: str
    timeout_s: float

    @property
    def job(self) -> str:
        """The name of the jobs, by which they are cancelled."""
        return f"hpc_swe-doctor-{self.token}"

    @property
    def command(self) -> list[str]:
        """What each node runs."""
        wait = ["--wait", str(self.timeout_s / 2), "--images", self.images]
        return [self.python, "-m", "hpc_swe.doctor.probe", str(self.folder), self.token, *wait]


@dataclass(frozen=True)
class SrunResult:
    """What came of one srun."""

    text: str
    errors: str
    timed_out: bool = False


def partition(ask: Ask, bench: Bench) -> Iterator[Finding]:
    """Probe a partition's nodes, and judge what they, or srun, say."""
    yield from lay_out(bench)
    outcome = srun(ask, bench)
    probes = probe.read(outcome.text)
    if len(probes) < ask.nodes:
        yield silence(ask, bench, outcome, len(probes))
    if probes:
        yield from nodes.findings(ask, probes, bench.images)


def alone(bench: Bench) -> Iterator[Finding]:
    """This machine, outside any job."""
    yield from lay_out(bench)
    probes = [probe.take(bench.folder, bench.token, ANSWER_S, bench.images)]
    yield from nodes.findings(Ask(), probes, bench.images)


def lay_out(bench: Bench) -> list[Finding]:
    """Make the folder in which nodes meet; the finding says why it cannot be."""
    try:
        bench.folder.mkdir(parents=True)
        (bench.folder / probe.TOKEN).write_text(bench.token)
    except OSError as error:
        remedy = "with --shared name a folder that you can write"
        says = f"{error.filename}: {error.strerror}"
        return [Finding("shared folder", "fault", says, remedy, "this machine")]
    return []


def srun(ask: Ask, bench: Bench) -> SrunResult:
    """One job; what outlives the deadline is cancelled by its name."""
    size = [f"--nodes={ask.nodes}", "--ntasks-per-node=1", f"--mem={ask.memory_mb}M", *ask.words]
    limit = [f"--time={round(bench.timeout_s / 60) + 2}", *([f"--gres=gpu:{ask.gpus}"] if ask.gpus else [])]
    command = [
        "srun",
        f"--partition={ask.partition}",
        f"--job-name={bench.job}",
        *size,
        *limit,
        *bench.command,
    ]
    # Inside a job srun would take that job's nodes.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key in FREE}
    with subprocess.Popen(
        command, env=kept, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as job:
        try:
            return SrunResult(*job.communicate(timeout=bench.timeout_s))
        except subprocess.TimeoutExpired:
            text, errors = _end(job, bench)
            return SrunResult(text, errors, timed_out=True)
        finally:
            if job.poll() is None:  # interrupted
                _end(job, bench)


def _end(job: "subprocess.Popen[str]", bench: Bench) -> tuple[str, str]:
    cancel = ["scancel", f"--name={bench.job}"]
    try:
        subprocess.run(cancel, timeout=ANSWER_S, check=False, capture_output=True)
        return job.communicate(timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        job.kill()
        return job.communicate()


def silence(ask: Ask, bench: Bench, outcome: SrunResult, answers: int) -> Finding:
    """Why fewer nodes answered than were asked."""
    where = f"partition {ask.partition}"
    if outcome.timed_out and "has been allocated" not in outcome.errors and "queued and" in outcome.errors:
        says = f"no {ask.nodes} nodes were free for {bench.timeout_s:.0f} s: they are not checked"
        remedy = "again when some are free, or with a larger --timeout"
        return Finding("nodes", "warning", says, remedy, where)
    count = f"{answers} of {ask.nodes} nodes answered"
    for pattern, check, begins, remedy in TROUBLES:
        if found := re.search(pattern, outcome.errors):
            return Finding(check, "fault", f"{count}: {begins}{found[1]}", remedy, where)
    late = f" in {bench.timeout_s:.0f} s" if outcome.timed_out else ""
    said = outcome.errors.strip().splitlines()
    last = next((line for line in said if "error:" in line), said[-1] if said else "srun said nothing")
    remedy = "look at the node that is missing (sinfo -R), or give slow ones a larger --timeout"
    return Finding("nodes", "fault", f"{count}{late}: {last}", remedy, where)
