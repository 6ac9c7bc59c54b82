"""Parse the output of three `scontrol show` calls of Slurm 22.05 or newer, and check it."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpc_swe.cluster.gpus import in_gres
from hpc_swe.launch.doctor.findings import Finding, PartitionNeeds, Severity

OLDEST = (22, 5)
CHECKPOINT_S = 30  # time for a learner's checkpoint, unless the model is large
MANY_JOBS = 64  # of one role, when no configuration says how many
UNUSABLE = re.compile(r"(?<!POWERED_)DOWN|DRAIN|FAIL|MAINT|NOT_RESPONDING|POWERING_DOWN|REBOOT|UNKNOWN|\*")
"""A node that is powered down starts when a job needs it."""


@dataclass(frozen=True)
class Partition:
    """A partition is one line of `scontrol show partition -o`, together with what its nodes have."""

    name: str
    is_default: bool
    state: str
    preempt_mode: str
    grace_s: int
    tier: int
    """Jobs of a partition with a higher tier may preempt those of this one."""
    nodes: int
    """Nodes that are not down, draining or reserved for maintenance."""
    gpus: int
    """Largest number of GPUs of one usable node."""
    minutes: float = math.inf
    """Largest walltime of a job."""
    cores: float = math.inf
    """Most cores that a job may have on one node; so is the memory. Infinite is unknown."""
    memory_gb: float = math.inf


@dataclass(frozen=True)
class Cluster:
    """A Slurm cluster is known by its settings and partitions, as scontrol prints them."""

    settings: dict[str, str]
    partitions: dict[str, Partition]

    def setting(self, key: str) -> str:
        """Return a value of slurm.conf or cgroup.conf; empty when it is unset or unknown to this version."""
        value = self.settings.get(key.lower(), "")
        return "" if value.startswith("(null") else value


def parse(config: str, partitions: str, nodes: str) -> Cluster:
    """Parse the output of `scontrol show config`, `show partition -o` and `show nodes -o`."""
    pairs = re.findall(r"^(\S+)\s*= ?(.*?)\s*$", config, re.MULTILINE)
    members = [_words(line) for line in nodes.splitlines() if line.startswith("NodeName=")]
    lines = [_words(line) for line in partitions.splitlines() if line.startswith("PartitionName=")]
    found = [_partition(words, members) for words in lines]
    return Cluster({key.lower(): value for key, value in pairs}, {each.name: each for each in found})


def _words(line: str) -> dict[str, str]:
    return {key: value for key, mark, value in (word.partition("=") for word in line.split()) if mark}


def _partition(words: dict[str, str], members: Sequence[dict[str, str]]) -> Partition:
    name = words["PartitionName"]
    inside = [node for node in members if name in node.get("Partitions", "").split(",")]
    usable = [node for node in inside if not UNUSABLE.search(node.get("State", ""))]
    return Partition(
        name=name,
        is_default=words.get("Default") == "YES",
        state=words.get("State", "UP"),
        preempt_mode=words.get("PreemptMode", "OFF").upper(),
        grace_s=_seconds(words.get("GraceTime", "0")),
        tier=int(words.get("PriorityTier", "1")),
        nodes=len(usable),
        gpus=max((in_gres(node.get("Gres", "")) for node in usable), default=0),
        minutes=_minutes(words.get("MaxTime", "")),
        cores=min(_number(words.get("MaxCPUsPerNode", "")), _largest(usable, "CPUTot")),
        memory_gb=min(_number(words.get("MaxMemPerNode", "")), _largest(usable, "RealMemory")) / 1024,
    )


def _largest(nodes: Sequence[dict[str, str]], key: str) -> float:
    return max((_number(node.get(key, "")) for node in nodes), default=math.inf)


def _number(text: str) -> float:
    """Return a limit; infinity where there is none, or where this version of Slurm does not tell."""
    return int(text) if text.isdigit() else math.inf


def _minutes(text: str) -> float:
    """Return the minutes of a time such as 2-00:00:00; infinity for UNLIMITED."""
    days, _, hours = text.rpartition("-")
    return int(days or 0) * 1440 + _seconds(hours) / 60 if ":" in hours else math.inf


def _seconds(text: str) -> int:
    total = 0
    for part in text.split(":"):
        total = total * 60 + (int(part) if part.isdigit() else 0)
    return total


def findings(cluster: Cluster, needs: Sequence[PartitionNeeds], jobs: int) -> Iterator[Finding]:
    """Yield the findings about the scheduler; `jobs` is the size of the largest array, 0 if unknown."""
    yield from (version(cluster), accounting(cluster), requeue(cluster), arrays(cluster, jobs))
    yield constraints(cluster)
    for need in needs:
        for finding in _about_partition(cluster, need):
            yield replace(finding, where=f"partition {need.partition}")


def _about_partition(cluster: Cluster, need: PartitionNeeds) -> Iterator[Finding]:
    yield partition(cluster, need)
    found = cluster.partitions.get(need.partition)
    if found:
        yield from limits(found, need)
        yield preemption(cluster, found)
        yield preemption_signal(cluster, found)
    if found and need.gpus:
        yield gres(cluster, need)


def version(cluster: Cluster) -> Finding:
    """Check the version: the output of older ones has another format."""
    text = cluster.setting("SLURM_VERSION")
    if tuple(map(int, re.findall(r"\d+", text)[:2])) >= OLDEST:
        return Finding("Slurm", "ok", f"version {text}")
    says = f"version {text or 'unknown'} is older than 22.05"
    return Finding("Slurm", "warning", says, "upgrade Slurm; until then the other findings may be wrong")


def accounting(cluster: Cluster) -> Finding:
    """Check that `sacct` can tell how a job ended."""
    kind = cluster.setting("AccountingStorageType") or "accounting_storage/none"
    if not kind.endswith("/none"):
        return Finding("accounting", "ok", kind)
    says = "no accounting: launch tick counts jobs that leave the queue, and reported nothing, as failed"
    remedy = "AccountingStorageType=accounting_storage/slurmdbd in slurm.conf"
    return Finding("accounting", "warning", says, remedy)


def requeue(cluster: Cluster) -> Finding:
    """Check that jobs are requeued after a node failure or preemption; else only a tick replaces them."""
    if cluster.setting("JobRequeue") != "0":
        return Finding("JobRequeue", "ok", "lost jobs are requeued")
    says = "JobRequeue=0: a job that is lost to a node failure or a preemption is not requeued"
    remedy = "JobRequeue=1 in slurm.conf, or sbatch --requeue; until then launch tick from cron replaces it"
    return Finding("JobRequeue", "warning", says, remedy)


def arrays(cluster: Cluster, jobs: int) -> Finding:
    """Check the limit on arrays: jobs of a role are numbered from 0, so MaxArraySize jobs fit."""
    text = cluster.setting("MaxArraySize")
    largest = int(text) if text.isdigit() else 0
    if largest >= (jobs or MANY_JOBS):
        return Finding("MaxArraySize", "ok", f"arrays of up to {largest} jobs")
    wanted = f"an array of {jobs} jobs is needed" if jobs else f"a role may need {MANY_JOBS} jobs"
    remedy = f"MaxArraySize={max(jobs, 1001)} in slurm.conf, or lower counts"
    verdict: Severity = "fault" if jobs else "warning"
    return Finding("MaxArraySize", verdict, f"MaxArraySize={largest}, and {wanted}", remedy)


def constraints(cluster: Cluster) -> Finding:
    """Check which limits Slurm is configured to enforce; the probes measure whether it does."""
    plugins, ram = cluster.setting("TaskPlugin"), cluster.setting("ConstrainRAMSpace")
    if "task/cgroup" in plugins and ram != "no":
        return Finding("cgroups", "ok", f"TaskPlugin={plugins}, ConstrainRAMSpace={ram or 'unknown'}")
    settings = f"TaskPlugin={plugins or 'none'}, ConstrainRAMSpace={ram or 'unset'}"
    says = f"{settings}: a job that runs out of memory can crash its node"
    remedy = "TaskPlugin=task/cgroup and ConstrainRAMSpace=yes (cgroup.conf); until then --exclusive"
    return Finding("cgroups", "fault", says, remedy)


def partition(cluster: Cluster, need: PartitionNeeds) -> Finding:
    """Check that a partition exists, accepts jobs and has as many usable nodes as the largest job needs."""
    found, known = cluster.partitions.get(need.partition), ", ".join(cluster.partitions)
    if found is None:
        says = f"there is no partition {need.partition!r}"
        return Finding("partition", "fault", says, f"name one of {known}")
    if found.state == "UP" and found.nodes >= need.job_nodes:
        return Finding("partition", "ok", f"{found.nodes} usable nodes")
    if found.state == "UP" and found.nodes:
        says = (
            f"a job needs {need.job_nodes} nodes at once, and {found.nodes} are usable: it would never start"
        )
        return Finding("partition", "fault", says, "fewer nodes in executor.roles, or another partition")
    remedy = f"see why its nodes are down (sinfo -R), or use another of {known}"
    return Finding("partition", "fault", f"it is {found.state} with {found.nodes} usable nodes", remedy)


def limits(found: Partition, need: PartitionNeeds) -> Iterator[Finding]:
    """Check that a partition lets each job run as long, and gives it as much of a node, as it asks for."""
    if not need.jobs:
        return
    too_large = [
        f"executor.roles.{job.role}.{key} asks for {asked:g} {unit}, and {most:g} are given"
        for job in need.jobs
        for key, unit, asked, most in (
            ("timeout_min", "minutes", job.minutes, found.minutes),
            ("cpus_per_task", "cores of a node", job.cores, found.cores),
            ("mem_gb", "GB of a node", job.memory_gb, found.memory_gb),
        )
        if asked > most
    ]
    if not too_large:
        yield Finding("sizes of jobs", "ok", "none asks for more time, cores or memory than it may have")
    for says in too_large:
        yield Finding("sizes of jobs", "fault", says, "lower it, or name a partition with larger nodes")


def preemption(cluster: Cluster, found: Partition) -> Finding:
    """Check which jobs may be preempted, how, and after what time."""
    if not _is_preempted(cluster, found):
        return Finding("PreemptMode", "ok", "its jobs are never preempted")
    grace = f"PreemptMode={found.preempt_mode} with GraceTime={found.grace_s} s"
    if "CANCEL" in found.preempt_mode:
        says = "a preempted job is cancelled"
        remedy = "launch tick from cron each minute, or PreemptMode=REQUEUE"
    elif "REQUEUE" not in found.preempt_mode:
        says = "a preempted job keeps its memory and sends no heartbeats, so that others redo its work"
        remedy = "PreemptMode=REQUEUE for this partition"
    elif found.grace_s < CHECKPOINT_S:
        says = f"a checkpoint may take {CHECKPOINT_S} s; otherwise the steps since the last one are repeated"
        remedy = (
            "GraceTime=120 for this partition, a smaller learner.checkpoint_every, or the learner elsewhere"
        )
    else:
        return Finding("PreemptMode", "ok", grace)
    return Finding("PreemptMode", "warning", f"{grace}: {says}", remedy)


def preemption_signal(cluster: Cluster, found: Partition) -> Finding:
    """Check that a preempted job gets the signal that it has requested."""
    check, parameters = "preempt_send_user_signal", cluster.setting("SlurmctldParameters").lower()
    if not _is_preempted(cluster, found):
        return Finding(check, "ok", "not needed: its jobs are never preempted")
    if check in parameters.split(","):
        return Finding(check, "ok", "preempted jobs get their signal at once")
    says = "a preempted batch job gets no signal during its grace time: at most the current step is lost"
    return Finding(check, "warning", says, f"SlurmctldParameters={check} in slurm.conf")


def _is_preempted(cluster: Cluster, found: Partition) -> bool:
    kind = cluster.setting("PreemptType") or "preempt/none"
    if kind.endswith("/none") or found.preempt_mode == "OFF":
        return False
    above = any(other.tier > found.tier for other in cluster.partitions.values())
    return above or "partition_prio" not in kind


def gres(cluster: Cluster, need: PartitionNeeds) -> Finding:
    """Check that a node of the partition has as many GPUs as are needed."""
    found = cluster.partitions[need.partition]
    if need.gpus <= found.gpus:
        return Finding("GRES", "ok", f"{found.gpus} GPUs per node, {need.gpus} needed")
    having = [each.name for each in cluster.partitions.values() if each.gpus >= need.gpus]
    kinds = cluster.setting("GresTypes") or "(unset)"
    says = f"{need.gpus} GPUs per node are needed; its nodes have {found.gpus}, GresTypes={kinds}"
    elsewhere = f"use partition {' or '.join(having)}"
    remedy = elsewhere if having else "set GresTypes=gpu in slurm.conf, and gres.conf"
    return Finding("GRES", "fault", says, remedy)
