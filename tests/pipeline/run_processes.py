"""Finding the processes of a run."""

import os
from pathlib import Path


def processes_of(root: Path) -> list[int]:
    """Pids whose command line names the run, this process and its children apart."""
    return [pid for pid, command in _commands() if str(root) in command and pid != os.getpid()]


def role_pids(run, role: str) -> list[int]:
    """Pids of a role's own processes, not of their keepers."""
    return [pid for pid, command in _commands() if f"-m jobs.{role} {run.root}" in command]


def children_of(pid: int) -> list[int]:
    """All descendants."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        direct = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [found for child in direct for found in (child, *children_of(child))]


def _commands() -> list[tuple[int, str]]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append((int(path.name), b" ".join(words).decode(errors="replace").strip()))
    return found
