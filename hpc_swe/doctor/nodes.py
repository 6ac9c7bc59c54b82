"""What the probes of one partition's nodes mean for a run.

A rule is a question put to each node, whose answer is why not. What has a size, or takes several nodes to
see, is a function.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpc_swe.doctor.findings import Ask, Finding, Severity
from hpc_swe.doctor.probe import Probe

TMP_FAULT_GB, TMP_WARNING_GB = 1.0, 10.0
CLOCK_WARNING_S, CLOCK_FAULT_S = 2.0, 60.0
VISIBLE_WARNING_MS, VISIBLE_FAULT_MS = 2_000.0, 20_000.0
RENAME_WARNING_MS = 50.0
MEMORY_SLACK = 1.5  # AllowedRAMSpace may add to what was asked for


@dataclass(frozen=True)
class Rule:
    """One question."""

    check: str
    why: Callable[[Probe], str]
    """Why a node is not well; empty when it is."""
    remedy: str
    well: str
    """What is said when all nodes are."""
    verdict: Severity = "fault"

    def judge(self, probes: Sequence[Probe]) -> Finding:
        """The first node's reason, and how many nodes have one."""
        reasons = [(probe.host, why) for probe in probes if (why := self.why(probe))]
        if not reasons:
            return Finding(self.check, "ok", self.well)
        more = f" (and {len(reasons) - 1} more of {len(probes)} nodes)" if len(reasons) > 1 else ""
        return Finding(self.check, self.verdict, f"{reasons[0][0]}: {reasons[0][1]}{more}", self.remedy)


NAMESPACES = Rule(
    "user namespaces",
    lambda probe: probe.user_namespaces and f"unshare fails: {probe.user_namespaces}",
    "sysctl user.max_user_namespaces=100000 kernel.unprivileged_userns_clone=1 "
    "kernel.apparmor_restrict_unprivileged_userns=0, those that the node has",
    "a job can make them",
)
APPTAINER = Rule(
    "Apptainer",
    lambda probe: "" if probe.apptainer else "there is no apptainer on a job's PATH",
    "install Apptainer on the nodes, or load its module before you submit",
    "on PATH",
)
CONTAINER = Rule(
    "sandbox",
    lambda probe: probe.container,
    "allow user namespaces and /dev/fuse (mode 0666); build the image with containers/build_image.sh",
    "a job opens one from the configuration's image",
)
TENSORBOARD = Rule(
    "TensorBoard",
    lambda probe: "" if probe.tensorboard else f"there is none beside python {probe.python}",
    "pip install tensorboard into the environment of jobs, or the coordinator cannot draw its view",
    "in the environment of jobs",
)
SHARED = Rule(
    "shared folder",
    lambda probe: probe.shared.error,
    "with --shared name a folder that this host and all nodes see, and that you can write",
    "seen and written by all nodes",
)
CROSSING = Rule(
    "rename between folders",
    lambda probe: probe.shared.crossing,
    "put the whole run folder on one file system, under one project id",
    "works",
)
LINKING = Rule(
    "hard link",
    lambda probe: probe.shared.linking,
    "results are published by link(2): put the run folder on Lustre, NFS or another file system that has it",
    "the first name stays",
)
FLOCK = Rule(
    "flock",
    lambda probe: probe.shared.flock or next((peer.lock for peer in probe.peers if peer.lock), ""),
    "hpc_swe needs none; mount with flock, or keep caches of Apptainer and pip on local disks",
    "excludes",
    "warning",
)
SOCKETS = Rule(
    "Unix sockets",
    lambda probe: probe.shared.sockets,
    "hpc_swe needs none there; keep TMPDIR on a local disk",
    "can be bound in the shared folder",
    "warning",
)
SEEN = Rule(
    "rename latency",
    lambda probe: next((peer.unseen for peer in probe.peers if peer.unseen), ""),
    "mount so that listings are fresh (NFS: actimeo=1, lookupcache=positive); see that the node lives",
    "all nodes see each other",
)
PORTS = Rule(
    "ports",
    lambda probe: next((f"{peer.port} (to {peer.host})" for peer in probe.peers if peer.port), ""),
    "open ports 1024-65535 between nodes, and see that host names resolve there (getent hosts NODE)",
    "every node reaches every other by name",
)


def findings(ask: Ask, probes: Sequence[Probe], images: str) -> Iterator[Finding]:
    """All checks of the nodes that answered. Without a folder of images no sandbox was tried."""
    where = f"partition {ask.partition}" if ask.partition else "this machine"
    for finding in _all(ask, probes, images):
        yield replace(finding, where=where, remedy="" if finding.verdict == "ok" else finding.remedy)


def _all(ask: Ask, probes: Sequence[Probe], images: str) -> Iterator[Finding]:
    yield Finding("python", "ok", ", ".join(sorted({probe.python for probe in probes})))
    yield NAMESPACES.judge(probes)
    yield replace(APPTAINER, well=", ".join(sorted({probe.apptainer for probe in probes}))).judge(probes)
    if images:
        yield CONTAINER.judge(probes)
    yield tmp(probes)
    if ask.partition:
        yield memory(probes, ask.memory_mb)
    if ask.gpus:
        yield gpus(probes, ask.gpus)
    yield TENSORBOARD.judge(probes)
    yield SHARED.judge(probes)
    reached = [probe for probe in probes if not probe.shared.error]
    if reached:
        yield from folder(reached)
    if reached and ask.partition:
        yield from between(reached)


def folder(probes: Sequence[Probe]) -> Iterator[Finding]:
    """What the shared folder can do on each node."""
    yield CROSSING.judge(probes)
    yield LINKING.judge(probes)
    yield FLOCK.judge(probes)
    yield SOCKETS.judge(probes)
    slowest = max(probe.shared.rename_ms for probe in probes)
    kinds = ", ".join(sorted({probe.shared.kind for probe in probes}))
    verdict = _grade(slowest, RENAME_WARNING_MS, float("inf"))
    remedy = "an episode is a dozen renames: fewer rollout slots, or a faster metadata server"
    yield Finding("rename", verdict, f"{slowest:.2f} ms on the slowest node, on {kinds}", remedy)


def between(probes: Sequence[Probe]) -> Iterator[Finding]:
    """What takes two nodes to see."""
    if not any(probe.peers for probe in probes):
        says = "one node was probed: ports, clocks and how soon a rename is seen are not checked"
        yield Finding("between nodes", "warning", says, "name a partition with two free nodes")
        return
    seen = SEEN.judge(probes)
    yield seen if seen.verdict != "ok" else visibility(probes)
    yield clocks(probes)
    yield PORTS.judge(probes)


def tmp(probes: Sequence[Probe]) -> Finding:
    """Sandboxes, sockets and compile caches lie there."""
    least = min(probes, key=lambda probe: probe.tmp_free_gb)
    told = f"{least.tmp} of {least.host} ({least.tmp_kind}) has {least.tmp_free_gb:.1f} GB free"
    verdict = _grade(-least.tmp_free_gb, -TMP_WARNING_GB, -TMP_FAULT_GB)
    kind = "a tmpfs is the job's own memory; " if least.tmp_kind == "tmpfs" else ""
    return Finding(
        "node-local /tmp", verdict, told, f"{kind}point TMPDIR at a larger local disk before you submit"
    )


def memory(probes: Sequence[Probe], asked_mb: int) -> Finding:
    """What the kernel enforces, whatever the settings say."""

    def why(probe: Probe) -> str:
        if 0 < probe.memory_mb <= asked_mb * MEMORY_SLACK:
            return ""
        limit = f"{probe.memory_mb:.0f} MB" if probe.memory_mb else "no limit"
        return f"{asked_mb} MB were asked for, and the kernel enforces {limit}"

    remedy = "task/cgroup, ConstrainRAMSpace=yes, SelectTypeParameters=CR_.._Memory; until then --exclusive"
    return Rule("memory limit", why, remedy, f"{asked_mb} MB were asked for and are enforced").judge(probes)


def gpus(probes: Sequence[Probe], asked: int) -> Finding:
    """As many as asked for, no others, and a driver behind them."""
    told = f"{asked} in CUDA_VISIBLE_DEVICES"
    given = Rule(
        "GPUs",
        lambda probe: (
            "" if probe.gpus == asked else f"{probe.gpus} in CUDA_VISIBLE_DEVICES, asked for {asked}"
        ),
        "gres.conf must name the device files, File=/dev/nvidia[0-..]; see slurmd's log on that node",
        f"{told}, and no other opens",
    )
    others = Rule(
        "GPUs",
        lambda probe: f"{told}, but {probe.gpu_files} /dev/nvidia* open" if probe.gpu_files > asked else "",
        "ConstrainDevices=yes in cgroup.conf, or jobs can use each other's",
        given.well,
        "warning",
    )
    driver = Rule(
        "GPUs",
        lambda probe: f"{told}, but {probe.gpu_files} /dev/nvidia* open" if probe.gpu_files < asked else "",
        "see that the driver is loaded (nvidia-smi), unless these are no Nvidia GPUs",
        given.well,
        "warning",
    )
    verdicts = [rule.judge(probes) for rule in (given, others, driver)]
    return next((finding for finding in verdicts if finding.verdict != "ok"), verdicts[0])


def visibility(probes: Sequence[Probe]) -> Finding:
    """How long one node's rename takes to show in another's listing."""
    slowest = max(peer.visible_ms for probe in probes for peer in probe.peers)
    verdict = _grade(slowest, VISIBLE_WARNING_MS, VISIBLE_FAULT_MS)
    remedy = "mount with a shorter attribute cache (NFS: actimeo=1), and raise lease.beat_s"
    return Finding("rename latency", verdict, f"another node sees one after {slowest:.1f} ms", remedy)


def clocks(probes: Sequence[Probe]) -> Finding:
    """No rule compares clocks, but Slurm's credentials and people who read logs do."""
    first = [
        (probe.host, peer) for probe in probes for peer in probe.peers if probe.rank == 0 and not peer.unseen
    ]
    if not first:
        return Finding("clock skew", "warning", "not measured: no other node was seen", "see rename latency")
    host, peer = max(first, key=lambda pair: abs(pair[1].clock_s))
    verdict = _grade(abs(peer.clock_s), CLOCK_WARNING_S, CLOCK_FAULT_S)
    says = f"the clock of {peer.host} is {peer.clock_s:+.3f} s from that of {host}"
    return Finding("clock skew", verdict, says, "run chrony or ntpd on both nodes")


def _grade(value: float, warning: float, fault: float) -> Severity:
    return "fault" if value > fault else "warning" if value > warning else "ok"
