"""Measure one node as a job sees it: python -m hpc_swe.launch.doctor.probe FOLDER. `srun` starts it.

The probe changes nothing outside FOLDER, which the doctor made on the shared file system, and needs only what
every job of a run needs. Each wait has a deadline. The record goes to standard output in short lines, since
`srun` mixes the long lines of several nodes.
"""

import argparse
import ctypes
import errno
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired

import msgspec

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Record
from hpc_swe.cluster import cgroups, gpus
from hpc_swe.cluster.processes import completed
from hpc_swe.launch.doctor import meeting
from hpc_swe.launch.doctor.meeting import Peer, reason
from hpc_swe.models import builds
from hpc_swe.models.builds import Builds

MARK = "hpc_swe-probe"
CHUNK = 700  # characters; srun forwards up to 1024 at a time
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
TOKEN = "token"


class Shared(Record, frozen=True, kw_only=True):
    """Hold what one node found out about the shared folder; an empty text means that the operation works."""

    kind: str = ""
    """Type of the file system."""
    error: str = ""
    """Why it cannot be read and written."""
    crossing: str = ""
    """Why a file cannot be renamed from one folder to another."""
    linking: str = ""
    """Why a link cannot publish a file without replacing an existing one."""
    rename_ms: float = 0.0
    """Median of one rename."""


class Probe(Record, frozen=True, kw_only=True):
    """A probe is everything that was measured on one node."""

    rank: int
    host: str
    python: str
    user_namespaces: str
    """Why they cannot be created; empty when they can."""
    apptainer: str
    """Its version; empty when it is not on PATH."""
    container: str
    """Why an image could not be run; empty when it could, or when no image was given."""
    tmp: str
    tmp_kind: str
    tmp_free_gb: float
    memory_mb: float
    """Memory limit of this job's cgroups; 0 is no limit."""
    gpus: int
    """Number of GPUs in CUDA_VISIBLE_DEVICES."""
    gpu_files: int
    """Number of files /dev/nvidia<n> that can be opened."""
    gpu_model: str
    """Of the first GPU, as the driver names it; empty without one."""
    tensorboard: bool
    flash_attention: bool
    """Whether the package flash-attn-4 is installed."""
    gpu_gib: float = 0.0
    """Memory of the smallest GPU; 0 without one."""
    glibc: str = ""
    """Version of the system's C library; empty where it is another one."""
    processor: str = ""
    """As uname names it: x86_64 or aarch64."""
    builds: Builds = Builds()
    """Versions of torch, vLLM and the driver."""
    shared: Shared
    peers: list[Peer]


def measure(folder: Path, token: str, wait_s: float, sandbox: str) -> Probe:
    """Measure everything about this node, in a few seconds on a healthy one."""
    rank, nodes = int(os.environ.get("SLURM_PROCID", "0")), int(os.environ.get("SLURM_NTASKS", "1"))
    shared = check_shared(folder, token, rank)
    peers = [] if shared.error else meeting.attend(folder, rank, nodes, wait_s)
    tmp, version = tempfile.gettempdir(), apptainer_version()
    return Probe(
        rank=rank,
        host=socket.gethostname(),
        python=f"{platform.python_version()} at {sys.executable}",
        user_namespaces=user_namespaces(),
        apptainer=version,
        container=container(sandbox) if sandbox and version else "",
        tmp=tmp,
        tmp_kind=kind_of(tmp, Path("/proc/self/mountinfo").read_text()),
        tmp_free_gb=shutil.disk_usage(tmp).free / 1e9,
        memory_mb=memory_limit() / 2**20,
        gpus=len([name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]),
        gpu_files=sum(_opens(path) for path in Path("/dev").glob("nvidia[0-9]*")),
        gpu_model=gpu_model(),
        gpu_gib=gpus.memory_gib(),
        glibc=platform.libc_ver()[1],
        processor=platform.machine(),
        builds=msgspec.structs.replace(builds.installed(), driver_cuda=builds.driver()),
        flash_attention=any(importlib.metadata.distributions(name="flash-attn-4")),
        tensorboard=importlib.util.find_spec("tensorboard") is not None,
        shared=shared,
        peers=peers,
    )


def check_shared(folder: Path, token: str, rank: int) -> Shared:
    """Read what the doctor wrote on its machine, then write, rename and link in the folder."""
    try:
        found = (folder / TOKEN).read_text()
        if found != token:
            return Shared(error=f"another folder has this name here: it holds {found!r}")
        mine = folder / f"node-{rank}"
        mine.mkdir()
        rename_ms = _rename_ms(mine)
    except OSError as error:
        return Shared(error=f"{error.strerror}: {error.filename}")
    return Shared(
        kind=kind_of(str(folder), Path("/proc/self/mountinfo").read_text()),
        crossing=reason(lambda: _cross(folder, mine)),
        linking=reason(lambda: _link_twice(mine)),
        rename_ms=rename_ms,
    )


def _rename_ms(folder: Path) -> float:
    names = [folder / f"name-{n}" for n in range(21)]
    names[0].touch()
    seconds = []
    for old, new in zip(names, names[1:], strict=False):
        started = time.perf_counter()
        os.rename(old, new)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e3


def _cross(folder: Path, mine: Path) -> None:
    (mine / "crosses").touch()
    os.rename(mine / "crosses", folder / f"crossed-{mine.name}")


def _link_twice(mine: Path) -> None:
    """Raise OSError unless a second link to the same name is refused, after a first one was made."""
    for name in ("first", "second"):
        (mine / name).touch()
    os.link(mine / "first", mine / "linked")
    try:
        os.link(mine / "second", mine / "linked")
    except FileExistsError:
        return
    raise OSError(errno.EINVAL, "a second link replaces the first")


def user_namespaces() -> str:
    """Return why a user namespace with a mount namespace in it cannot be created; empty when it can."""
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()  # a process with threads, such as those of numpy, may not call unshare
    if child == 0:
        os._exit(0 if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 else ctypes.get_errno())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return os.strerror(code) if code else ""


def apptainer_version() -> str:
    """Return Apptainer's version; empty when it is not on PATH."""
    if shutil.which("apptainer") is None:
        return ""
    command = ["apptainer", "--version"]
    try:
        done = completed(Popen(command, text=True, stdout=PIPE, stderr=PIPE), 30)
    except TimeoutExpired:
        return "unknown version: no answer in 30 s"
    return done.stdout.strip() or done.stderr.strip() or f"unknown version: exit code {done.returncode}"


def container(sandbox: str) -> str:
    """Return why a sandbox cannot be opened, from the table [sandbox] as JSON; empty when it can."""
    from hpc_swe.base import loader

    try:
        loader.load("sandboxes", msgspec.json.decode(sandbox)).check()
    except ConfigError as error:
        return re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Apptainer writes in colours
    return ""


def memory_limit() -> int:
    """Return the lowest memory limit of this process's cgroups, in bytes; 0 when there is none."""
    limits = [limit for limit in map(cgroups.limit, cgroups.own_limit_files()) if limit < cgroups.NO_LIMIT]
    return min(limits, default=0)


def kind_of(path: str, mountinfo: str) -> str:
    """Return the type of the file system that holds a path."""
    place = os.path.realpath(path)
    holding = [(at, fstype) for _, at, fstype, _ in cgroups.mounts(mountinfo) if cgroups.holds(at, place)]
    return max(holding, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]


def gpu_model() -> str:
    """Return the name of the first GPU, such as NVIDIA H200; empty without one."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    found = re.search(r"^Model:\s*(.*)$", files[0].read_text(), re.MULTILINE) if files else None
    return found[1] if found else ""


def _opens(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def lines(probe: Probe) -> list[str]:
    """Return the record as lines that name the node, so that those of several nodes may be mixed."""
    text = msgspec.json.encode(probe).decode()
    return [f"{MARK} {probe.rank} {text[at : at + CHUNK]}" for at in range(0, len(text), CHUNK)]


def read(text: str) -> list[Probe]:
    """Return the complete records in the mixed lines of several nodes, sorted by rank."""
    parts: dict[str, str] = {}
    for rank, chunk in re.findall(rf"^{MARK} (\d+) (.*)$", text, re.MULTILINE):
        parts[rank] = parts.get(rank, "") + chunk
    whole = [text for text in parts.values() if text.endswith("}")]
    return sorted((msgspec.json.decode(text, type=Probe) for text in whole), key=lambda probe: probe.rank)


def main() -> None:
    """Measure this node and print the record."""
    parser = argparse.ArgumentParser(
        prog="python -m hpc_swe.launch.doctor.probe", description="Measure this node."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("token")
    parser.add_argument("--wait", type=float, default=60.0)
    parser.add_argument("--sandbox", default="")
    arguments = parser.parse_args()
    signal.alarm(int(arguments.wait * 2) + 30)  # ends a process that hangs, for example on a file system
    probe = measure(arguments.folder, arguments.token, arguments.wait, arguments.sandbox)
    print("\n".join(lines(probe)), flush=True)


if __name__ == "__main__":
    main()
