"""Judge what the probes of one partition's nodes measured.

A rule asks every node the same question, and a node answers with the reason why not. Checks that compare
sizes or several nodes are functions.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpc_swe.launch.doctor.findings import ComputingNeeds, Finding, PartitionNeeds, Severity
from hpc_swe.launch.doctor.probe import Probe

TMP_FAULT_GB, TMP_WARNING_GB = 1.0, 10.0
VISIBLE_WARNING_MS, VISIBLE_FAULT_MS = 2_000.0, 20_000.0
RENAME_WARNING_MS = 50.0
MEMORY_SLACK = 1.5  # AllowedRAMSpace may add to the requested memory


@dataclass(frozen=True)
class Rule:
    """A rule is one question to every node."""

    check: str
    reason: Callable[[Probe], str]
    """Return why a node fails the check; empty when it passes."""
    remedy: str
    success: str
    """The finding's text when all nodes pass."""
    verdict: Severity = "fault"

    def judge(self, probes: Sequence[Probe]) -> Finding:
        """Return a finding with the first failing node's reason and the number of failing nodes."""
        reasons = [(probe.host, reason) for probe in probes if (reason := self.reason(probe))]
        if not reasons:
            return Finding(self.check, "ok", self.success)
        more = f" (and {len(reasons) - 1} more of {len(probes)} nodes)" if len(reasons) > 1 else ""
        return Finding(self.check, self.verdict, f"{reasons[0][0]}: {reasons[0][1]}{more}", self.remedy)


NAMESPACES = Rule(
    "user namespaces",
    lambda probe: probe.user_namespaces and f"unshare fails: {probe.user_namespaces}",
    "sysctl user.max_user_namespaces=100000 kernel.unprivileged_userns_clone=1 "
    "kernel.apparmor_restrict_unprivileged_userns=0, as far as the node has these settings",
    "a job can create them",
)
APPTAINER = Rule(
    "Apptainer",
    lambda probe: "" if probe.apptainer else "apptainer is not on a job's PATH",
    "install Apptainer on the nodes, or load its module before you submit",
    "on PATH",
)
CONTAINER = Rule(
    "sandbox",
    lambda probe: probe.container,
    "allow user namespaces and /dev/fuse (mode 0666)",
    "a job can open one from the configuration's image",
)
NO_IMAGE = "make image builds the demonstration's; python -m hpc_swe.build_images those of SWE-bench"
TENSORBOARD = Rule(
    "TensorBoard",
    lambda probe: "" if probe.tensorboard else f"it is not installed for python {probe.python}",
    "pip install tensorboard into the environment of jobs; without it the coordinator draws no curves",
    "is installed in the environment of jobs",
)
ATTENTION = Rule(
    "flash-attn-4",
    lambda probe: "" if probe.flash_attention else f"it is not installed, and faster on {probe.gpu_model}",
    "make gpu installs it into .venv-gpu; start the run with the Python of that environment",
    "is installed in the environment of jobs",
    "warning",
)
OLDEST_GLIBC = {"x86_64": (2, 31), "aarch64": (2, 34)}
"""Version of the C library that vLLM's packages are built for; docs/install.md names systems that have it."""
TOO_OLD = re.compile(r"\b(V100S?|P100|P40|T4|K80|M60|Quadro RTX)\b")
"""GPUs with a compute capability below 8.0."""
NEWEST = re.compile(r"\b(G?H|G?B)(100|200|300|800)\b")
"""GPUs for which flash-attn-4 has kernels: Hopper and Blackwell."""
SHARED = Rule(
    "shared folder",
    lambda probe: probe.shared.error,
    "with --shared name a folder that this host and all nodes share and that you can write",
    "can be read and written by all nodes",
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
    "results are published by link(2): put the run folder on Lustre, NFS or another file system with links",
    "a second link to the same name is refused",
)
SEEN = Rule(
    "rename latency",
    lambda probe: next((peer.unseen for peer in probe.peers if peer.unseen), ""),
    "mount so that listings are current (NFS: actimeo=1, lookupcache=positive); check that the node is up",
    "all nodes see each other",
)
PORTS = Rule(
    "ports",
    lambda probe: next((f"{peer.port} (to {peer.host})" for peer in probe.peers if peer.port), ""),
    "open ports 1024-65535 between nodes, and check that host names resolve there (getent hosts NODE)",
    "every node reaches every other by name",
)


def glibc(probe: Probe) -> str:
    """Say why the packages of vLLM find no build for a node's C library; empty if they do."""
    oldest = OLDEST_GLIBC.get(probe.processor, (0, 0))
    if tuple(map(int, re.findall(r"\d+", probe.glibc)[:2])) >= oldest or not probe.glibc:
        return ""
    return f"glibc {probe.glibc} on {probe.processor}, and wheels need {'.'.join(map(str, oldest))}"


GLIBC = Rule(
    "glibc",
    glibc,
    "let these jobs run on nodes with a newer system, such as Debian 11, Ubuntu 20.04 or Rocky 9",
    "new enough for the wheels of vLLM and torch",
)


def kernels(need: PartitionNeeds, model: str) -> Finding:
    """Check that a model of GPU has the kernels that learner and engines compute with."""
    check = "GPU kernels"
    expert = {each.what for each in need.computing if each.has_experts}
    if TOO_OLD.search(model):
        return Finding(check, "fault", f"{model} has a compute capability below 8.0", "use an A100 or newer")
    if "learner" in expert and not NEWEST.search(model):
        says = f"on {model} torch computes a learner's experts one after the other"
        return Finding(check, "warning", says, "let a learner of a model with experts run on Hopper GPUs")
    if "engine" in expert and re.search(r"\bG?B[123]00\b", model):
        says = f"on {model} vLLM chooses kernels of experts that take minutes for new weights"
        return Finding(check, "warning", says, 'set engine.extra = ["--moe-backend", "triton"]')
    attention = "flash-attn-4" if NEWEST.search(model) else "cuDNN"
    return Finding(check, "ok", f"{attention} computes a learner's attention on {model}")


def findings(need: PartitionNeeds, probes: Sequence[Probe], images: str) -> Iterator[Finding]:
    """Yield the findings about the nodes that answered; sandboxes need a folder of images."""
    where = f"partition {need.partition}" if need.partition else "this machine"
    for finding in _all(need, probes, images):
        yield replace(finding, where=where, remedy="" if finding.verdict == "ok" else finding.remedy)


def _all(need: PartitionNeeds, probes: Sequence[Probe], images: str) -> Iterator[Finding]:
    yield Finding("python", "ok", ", ".join(sorted({probe.python for probe in probes})))
    yield NAMESPACES.judge(probes)
    yield replace(APPTAINER, success=", ".join(sorted({probe.apptainer for probe in probes}))).judge(probes)
    if images:
        has_none = any("no .sif file" in probe.container for probe in probes)
        yield replace(CONTAINER, remedy=NO_IMAGE if has_none else CONTAINER.remedy).judge(probes)
    yield tmp(probes)
    if need.partition:
        yield memory(probes, need.memory_mb)
    if need.gpus:
        yield gpus(probes, need.gpus)
    yield from computing(need, probes)
    yield TENSORBOARD.judge(probes)
    yield SHARED.judge(probes)
    reached = [probe for probe in probes if not probe.shared.error]
    if reached:
        yield from folder(reached)
    if reached and need.partition:
        yield from between(reached)


def computing(need: PartitionNeeds, probes: Sequence[Probe]) -> Iterator[Finding]:
    """Yield the findings about what learner and engines compute with."""
    if need.computing:
        yield GLIBC.judge(probes)
    with_gpus = [probe for probe in probes if probe.gpu_model and need.gpus]
    yield from (kernels(need, model) for model in sorted({probe.gpu_model for probe in with_gpus}))
    if helped := [probe for probe in with_gpus if NEWEST.search(probe.gpu_model)]:
        yield ATTENTION.judge(helped)
    if any(probe.gpu_gib for probe in probes):
        yield gpu_memory(need, probes)
    yield from (builds(each, probes) for each in need.computing if each.plugin)


def folder(probes: Sequence[Probe]) -> Iterator[Finding]:
    """Yield the findings about the shared folder on each node."""
    yield from (rule.judge(probes) for rule in (CROSSING, LINKING))
    slowest = max(probe.shared.rename_ms for probe in probes)
    kinds = ", ".join(sorted({probe.shared.kind for probe in probes}))
    verdict = _grade(slowest, RENAME_WARNING_MS, float("inf"))
    remedy = "an episode needs a dozen renames: use fewer rollout slots, or a faster metadata server"
    yield Finding("rename", verdict, f"{slowest:.2f} ms on the slowest node, on {kinds}", remedy)


def between(probes: Sequence[Probe]) -> Iterator[Finding]:
    """Yield the findings that need two nodes."""
    if not any(probe.peers for probe in probes):
        says = "only one node was probed: ports and the latency of renames are not checked"
        yield Finding("between nodes", "warning", says, "name a partition with two free nodes")
        return
    seen = SEEN.judge(probes)
    yield seen if seen.verdict != "ok" else visibility(probes)
    yield PORTS.judge(probes)


def tmp(probes: Sequence[Probe]) -> Finding:
    """Check the free space for sandboxes, sockets and compile caches."""
    least = min(probes, key=lambda probe: probe.tmp_free_gb)
    says = f"{least.tmp} of {least.host} ({least.tmp_kind}) has {least.tmp_free_gb:.1f} GB free"
    verdict = _grade(-least.tmp_free_gb, -TMP_WARNING_GB, -TMP_FAULT_GB)
    note = "a tmpfs uses the job's own memory; " if least.tmp_kind == "tmpfs" else ""
    remedy = f"{note}point TMPDIR at a larger local disk before you submit"
    return Finding("node-local /tmp", verdict, says, remedy)


def memory(probes: Sequence[Probe], requested_mb: int) -> Finding:
    """Check the limit that the kernel enforces, whatever the settings say."""

    def reason(probe: Probe) -> str:
        if 0 < probe.memory_mb <= requested_mb * MEMORY_SLACK:
            return ""
        limit = f"{probe.memory_mb:.0f} MB" if probe.memory_mb else "no limit"
        return f"{requested_mb} MB were requested, and the kernel enforces {limit}"

    remedy = "task/cgroup, ConstrainRAMSpace=yes, SelectTypeParameters=CR_.._Memory; until then --exclusive"
    success = f"{requested_mb} MB were requested and are enforced"
    return Rule("memory limit", reason, remedy, success).judge(probes)


def gpus(probes: Sequence[Probe], requested: int) -> Finding:
    """Check that jobs get the GPUs that they request and no others, and that a driver is loaded."""
    listed = f"{requested} in CUDA_VISIBLE_DEVICES"
    success = f"{listed}, and no other can be opened"

    def given(probe: Probe) -> str:
        found = f"{probe.gpus} in CUDA_VISIBLE_DEVICES, requested {requested}"
        return "" if probe.gpus == requested else found

    def opened(probe: Probe) -> str:
        return f"{listed}, but {probe.gpu_files} /dev/nvidia* can be opened"

    names = "gres.conf must name the device files, File=/dev/nvidia[0-..]; see slurmd's log on that node"
    constrain = "set ConstrainDevices=yes in cgroup.conf, or jobs can use each other's GPUs"
    load = "check that the driver is loaded (nvidia-smi), unless these are not Nvidia GPUs"
    rules = (
        Rule("GPUs", given, names, success),
        Rule("GPUs", lambda p: opened(p) * (p.gpu_files > requested), constrain, success, "warning"),
        Rule("GPUs", lambda p: opened(p) * (p.gpu_files < requested), load, success, "warning"),
    )
    verdicts = [rule.judge(probes) for rule in rules]
    return next((finding for finding in verdicts if finding.verdict != "ok"), verdicts[0])


def gpu_memory(need: PartitionNeeds, probes: Sequence[Probe]) -> Finding:
    """Compare the memory of the smallest GPU with what learner and engines need at least."""
    least = min(probe.gpu_gib for probe in probes if probe.gpu_gib)
    large = [each for each in need.computing if each.least_gib > least]
    if not large:
        says = f"{least:.1f} GiB each; a start compares gpu_gib of a role in [executor] with its estimate"
        return Finding("GPU memory", "ok", says)
    says = ", ".join(f"the {each.what} needs {each.least_gib:.1f} GiB" for each in large)
    remedy = "divide it among more GPUs; `launch start --dry-run` shows what takes the memory"
    return Finding("GPU memory", "fault", f"{says} of each GPU, which has {least:.1f} GiB", remedy)


def builds(needs: ComputingNeeds, probes: Sequence[Probe]) -> Finding:
    """Check that torch, vLLM and the driver can compute on the configured device."""
    check = f"build of the {needs.what}"
    for probe in probes:
        if problem := needs.plugin.build_problem(probe.builds) if needs.plugin else "":
            says, _, remedy = problem.partition("; ")
            return Finding(check, "fault", f"{probe.host}: {says}", remedy)
    found = sorted({f"torch {each.builds.torch}, vLLM {each.builds.vllm}" for each in probes})
    return Finding(check, "ok", "; ".join(found))


def visibility(probes: Sequence[Probe]) -> Finding:
    """Check how long one node's rename takes to show in another's listing."""
    slowest = max(peer.visible_ms for probe in probes for peer in probe.peers)
    verdict = _grade(slowest, VISIBLE_WARNING_MS, VISIBLE_FAULT_MS)
    remedy = "mount with a shorter attribute cache (NFS: actimeo=1), and raise lease.ttl_s"
    return Finding("rename latency", verdict, f"another node sees one after {slowest:.1f} ms", remedy)


def _grade(value: float, warning: float, fault: float) -> Severity:
    return "fault" if value > fault else "warning" if value > warning else "ok"
