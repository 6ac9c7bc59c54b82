"""Finding the processes of a run, and saying of which kind each is."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_swe.cluster.processes import descendants, start_time

KINDS = {
    "-m submitit.local._local": "submitit's controller",
    "-m submitit.core._submit": "submitit's job",
    "-m jobs.run ": "watchdog",
    "-m jobs.coordinator ": "coordinator",
    "-m jobs.rollout ": "rollout worker",
    "-m jobs.reward ": "reward worker",
    "-m jobs.inference ": "inference supervisor",
    "-m jobs.learner ": "learner rank",
    "inference.guard ": "guard",
    "vllm serve ": "API server",
    "VLLM::EngineCore": "EngineCore",
    "resource_tracker": "resource tracker",
    "Apptainer runtime parent": "apptainer",
    "appinit": "container init",
    "squashfuse": "FUSE daemon",
    "fuse-overlayfs": "FUSE daemon",
    "fuse2fs": "FUSE daemon",
    "-m hpc_swe.launch tick": "tick",
}
"""What a command line holds, and whose it is. The first that fits counts: a guard's names its engine, too."""
ROLES = ("coordinator", "rollout", "reward", "inference", "learner")


@dataclass(frozen=True)
class Process:
    """One process of a run, told from a later one with the same number by its start."""

    pid: int
    started: str
    kind: str
    role: str
    """Role of the job that it belongs to; empty for a tick."""

    @property
    def is_alive(self) -> bool:
        return start_time(self.pid) == self.started


def family() -> list[Process]:
    """All living processes below this one. The role and the container are those of the nearest ancestor."""
    found: dict[int, Process] = {}
    for pid in descendants(os.getpid()):  # each after its parent
        started, parent = start_time(pid), found.get(_parent(pid))
        if started is None:
            continue
        words = command(pid)
        kind = next((kind for sign, kind in KINDS.items() if sign in words), "")
        found[pid] = Process(
            pid, started, kind or _below(parent), _role(words) or (parent.role if parent else "")
        )
    return list(found.values())


def _below(parent: Process | None) -> str:
    """What a process is that is known by its parent alone."""
    if parent is None:
        return "orphan"
    if parent.kind == "learner rank":
        return "checkpoint writer"
    inside = ("container init", "container", "sandbox", "command", "command")
    return inside[inside.index(parent.kind) + 1] if parent.kind in inside else f"child of {parent.kind}"


def _role(words: str) -> str:
    signs = {role: (f"-m jobs.run {role} ", f"-m jobs.{role} ", f"/logs/{role}") for role in ROLES}
    return next((role for role, sign in signs.items() if any(each in words for each in sign)), "")


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def command(pid: int) -> str:
    """Its words, with a blank between them; empty of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def processes_of(root: Path) -> list[int]:
    """Pids whose command line names the run, this process and its children apart."""
    return [pid for pid, words in _commands() if str(root) in words and pid != os.getpid()]


def role_pids(run, role: str) -> list[int]:
    """Pids of a role's own processes, not of their watchdogs."""
    return [pid for pid, words in _commands() if f"-m jobs.{role} {run.root}" in words]


def temporary(pids: list[int]) -> set[Path]:
    """Shared memory that processes have open, and their folders of temporary files."""
    found = set()
    for process in (Path("/proc", str(pid)) for pid in pids):
        try:
            words = (process / "maps").read_text().split()
            variables = (process / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended
        found |= {Path(word) for word in words if word.startswith("/dev/shm/")}
        found |= {Path(word[7:]) for word in variables if word.startswith("TMPDIR=")}
    return found


def _commands() -> Iterator[tuple[int, str]]:
    for path in Path("/proc").glob("[0-9]*"):
        if start_time(int(path.name)) is not None:
            yield int(path.name), command(int(path.name))
