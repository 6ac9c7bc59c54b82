"""What Slurm says of itself, from 22.05 on: parsed text of three `scontrol show` calls, and its checks."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_swe.doctor.findings import Ask, Finding
from hpc_swe.gpus import in_gres

OLDEST = (22, 5)
CHECKPOINT_S = 30  # a learner's checkpoint, unless the model is large
MANY_JOBS = 64  # of one role, when no configuration says how many
UNUSABLE = re.compile(r"DOWN|DRAIN|FAIL|MAINT|NOT_RESPONDING|POWERING_DOWN|REBOOT|UNKNOWN|\*")


@dataclass(frozen=True)
class Partition:
    """One line of `scontrol show partition -o`, and what its nodes have."""

    name: str
    is_default: bool
    state: str
    preempt_mode: str
    grace_s: int
    tier: int
    """A job may be preempted by those of a partition with a higher one."""
    nodes: int
    """Nodes that are not down, draining or reserved for maintenance."""
    gpus: int
    """The most GPUs that one of them has."""


@dataclass(frozen=True)
class Cluster:
    """A Slurm cluster in its own words."""

    settings: dict[str, str]
    partitions: dict[str, Partition]

    def setting(self, key: str) -> str:
        """A value of slurm.conf or cgroup.conf; empty where it is unset or unknown to this version."""
        value = self.settings.get(key.lower(), "")
        return "" if value.startswith("(null") else value


def parse(config: str, partitions: str, nodes: str) -> Cluster:
    """From the texts of `scontrol show config`, `show partition -o` and `show nodes -o`."""
    pairs = re.findall(r"^(\S+)\s*= ?(.*?)\s*$", config, re.MULTILINE)
    members = [_words(line) for line in nodes.splitlines() if line.startswith("NodeName=")]
    lines = [_words(line) for line in partitions.splitlines() if line.startswith("PartitionName=")]
    found = [_partition(words, members) for words in lines]
    return Cluster({key.lower(): value for key, value in pairs}, {each.name: each for each in found})


def _words(line: str) -> dict[str, str]:
    return {key: value for key, mark, value in (word.partition("=") for word in line.split()) if mark}


def _partition(words: dict[str, str], members: Sequence[dict[str, str]]) -> Partition:
    name = words["PartitionName"]
    usable = [
        node
        for node in members
        if name in node.get("Partitions", "").split(",") and not UNUSABLE.search(node.get("State", ""))
    ]
    return Partition(
        name=name,
        is_default=words.get("Default") == "YES",
        state=words.get("State", "UP"),
        preempt_mode=words.get("PreemptMode", "OFF").upper(),
        grace_s=_seconds(words.get("GraceTime", "0")),
        tier=int(words.get("PriorityTier", "1")),
        nodes=len(usable),
        gpus=max((in_gres(node.get("Gres", "")) for node in usable), default=0),
    )


def _seconds(text: str) -> int:
    total = 0
    for part in text.split(":"):
        total = total * 60 + (int(part) if part.isdigit() else 0)
    return total


def findings(cluster: Cluster, asks: Sequence[Ask], jobs: int) -> Iterator[Finding]:
    """All checks of the scheduler; `jobs` is the most that one role has, 0 where nobody knows."""
    yield version(cluster)
    yield accounting(cluster)
    yield requeue(cluster)
    yield arrays(cluster, jobs)
    yield constraints(cluster)
    for ask in asks:
        yield partition(cluster, ask)
        if ask.partition in cluster.partitions:
            yield preemption(cluster, cluster.partitions[ask.partition])
            yield notice(cluster, cluster.partitions[ask.partition])
        if ask.partition in cluster.partitions and ask.gpus:
            yield gres(cluster, ask)


def version(cluster: Cluster) -> Finding:
    """Older ones print other words."""
    text = cluster.setting("SLURM_VERSION")
    numbers = tuple(map(int, re.findall(r"\d+", text)[:2]))
    if numbers < OLDEST:
        return Finding(
            "Slurm",
            "warning",
            f"version {text or 'unknown'} is older than 22.05",
            "upgrade Slurm, or read on with care",
        )
    return Finding("Slurm", "ok", f"version {text}")


def accounting(cluster: Cluster) -> Finding:
    """`sacct` tells how a job ended."""
    kind = cluster.setting("AccountingStorageType") or "accounting_storage/none"
    if kind.endswith("/none"):
        return Finding(
            "accounting",
            "warning",
            "no accounting: sacct cannot tell how a job ended; launch tick works without",
            "AccountingStorageType=accounting_storage/slurmdbd in slurm.conf",
        )
    return Finding("accounting", "ok", kind)


def requeue(cluster: Cluster) -> Finding:
    """Without it a job that a node or a preemption takes is gone, and only a tick replaces it."""
    if cluster.setting("JobRequeue") == "0":
        return Finding(
            "JobRequeue",
            "warning",
            "JobRequeue=0: a job lost to a node or a preemption does not come back by itself",
            "JobRequeue=1 in slurm.conf, or sbatch --requeue; until then launch tick from cron replaces it",
        )
    return Finding("JobRequeue", "ok", "lost jobs are requeued")


def arrays(cluster: Cluster, jobs: int) -> Finding:
    """A role's jobs are numbered from 0, so that an array of MaxArraySize tasks is the largest."""
    text = cluster.setting("MaxArraySize")
    largest = int(text) if text.isdigit() else 0
    if largest < (jobs or MANY_JOBS):
        wanted = f"an array of {jobs} jobs is wanted" if jobs else f"a role may want {MANY_JOBS} jobs"
        return Finding(
            "MaxArraySize",
            "fault" if jobs else "warning",
            f"MaxArraySize={largest}, and {wanted}",
            f"MaxArraySize={max(jobs, 1001)} in slurm.conf, or executor.array_size = {largest}",
        )
    return Finding("MaxArraySize", "ok", f"arrays of up to {largest} jobs")


def constraints(cluster: Cluster) -> Finding:
    """What Slurm means to enforce; the probes measure whether it does."""
    plugins, ram = cluster.setting("TaskPlugin"), cluster.setting("ConstrainRAMSpace")
    if "task/cgroup" not in plugins or ram == "no":
        return Finding(
            "cgroups",
            "fault",
            f"TaskPlugin={plugins or 'none'}, ConstrainRAMSpace={ram or 'unset'}: "
            "a job that runs out of memory takes the node with it",
            "TaskPlugin=task/cgroup and ConstrainRAMSpace=yes (cgroup.conf); until then --exclusive",
        )
    return Finding("cgroups", "ok", f"TaskPlugin={plugins}, ConstrainRAMSpace={ram or 'not told'}")


def partition(cluster: Cluster, ask: Ask) -> Finding:
    """It is there, takes jobs, and has nodes."""
    where, known = f"partition {ask.partition}", ", ".join(cluster.partitions)
    found = cluster.partitions.get(ask.partition)
    if found is None:
        return Finding(
            "partition", "fault", f"there is no partition {ask.partition!r}", f"name one of {known}", where
        )
    if found.state != "UP" or not found.nodes:
        return Finding(
            "partition",
            "fault",
            f"it is {found.state} with {found.nodes} usable nodes",
            f"ask when it comes back (sinfo -R), or take another of {known}",
            where,
        )
    return Finding("partition", "ok", f"{found.nodes} usable nodes", where=where)


def preemption(cluster: Cluster, found: Partition) -> Finding:
    """Which jobs are taken away, how, and after what time."""
    where = f"partition {found.name}"
    if not _is_preempted(cluster, found):
        return Finding("PreemptMode", "ok", "nobody preempts its jobs", where=where)
    grace = f"PreemptMode={found.preempt_mode} with GraceTime={found.grace_s} s"
    if "CANCEL" in found.preempt_mode:
        says, remedy = (
            "a preempted job is cancelled",
            "launch tick from cron each minute, or PreemptMode=REQUEUE",
        )
    elif "REQUEUE" not in found.preempt_mode:
        says = "a preempted job keeps its memory and stops beating, so that its work is given to others"
        remedy = "PreemptMode=REQUEUE for this partition"
    elif found.grace_s < CHECKPOINT_S:
        says = f"a checkpoint may take {CHECKPOINT_S} s, so that steps since the last one are done again"
        remedy = (
            "GraceTime=120 for this partition, a smaller learner.checkpoint_every, or a learner elsewhere"
        )
    else:
        return Finding("PreemptMode", "ok", grace, where=where)
    return Finding("PreemptMode", "warning", f"{grace}: {says}", remedy, where)


def notice(cluster: Cluster, found: Partition) -> Finding:
    """Whether a job that is preempted hears of it by the signal that it asked for."""
    where = f"partition {found.name}"
    parameters = cluster.setting("SlurmctldParameters").lower().split(",")
    if not _is_preempted(cluster, found):
        return Finding("preempt_send_user_signal", "ok", "not needed: nobody preempts its jobs", where=where)
    if "preempt_send_user_signal" not in parameters:
        return Finding(
            "preempt_send_user_signal",
            "warning",
            "a preempted batch job hears nothing before its grace is over: at most the open step is lost",
            "SlurmctldParameters=preempt_send_user_signal in slurm.conf",
            where,
        )
    return Finding("preempt_send_user_signal", "ok", "preempted jobs get their signal at once", where=where)


def _is_preempted(cluster: Cluster, found: Partition) -> bool:
    kind = cluster.setting("PreemptType") or "preempt/none"
    if kind.endswith("/none") or found.preempt_mode == "OFF":
        return False
    above = any(other.tier > found.tier for other in cluster.partitions.values())
    return above or "partition_prio" not in kind


def gres(cluster: Cluster, ask: Ask) -> Finding:
    """GPUs are asked for where there are some, and as many as one node has."""
    where, found = f"partition {ask.partition}", cluster.partitions[ask.partition]
    if ask.gpus > found.gpus:
        having = [each.name for each in cluster.partitions.values() if each.gpus >= ask.gpus]
        kinds = cluster.setting("GresTypes") or "(unset)"
        return Finding(
            "GRES",
            "fault",
            f"{ask.gpus} GPUs a node are asked for; its nodes have {found.gpus}, GresTypes={kinds}",
            f"ask for them in {' or '.join(having)}"
            if having
            else "GresTypes=gpu in slurm.conf, and gres.conf",
            where,
        )
    return Finding("GRES", "ok", f"{found.gpus} GPUs a node, {ask.gpus} asked for", where=where)
