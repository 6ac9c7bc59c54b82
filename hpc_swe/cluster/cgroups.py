"""Read the memory limits of the control groups that this process is in, of cgroup v1 and v2."""

from collections.abc import Iterable, Iterator
from pathlib import Path

NO_LIMIT = 2**50
"""Bytes; cgroup v1 writes a number of this size where there is no limit."""
USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""File with the limit of a group -> file with what its processes use."""
CACHES = ("active_file", "inactive_file")


def own_limit_files() -> list[Path]:
    """Return the files that limit this process's memory, of its own group first."""
    texts = (Path("/proc/self", name).read_text() for name in ("cgroup", "mountinfo"))
    return [path for path in limit_files(*texts) if path.exists()]


def limit_files(cgroup: str, mountinfo: str) -> Iterator[Path]:
    """Yield the files of cgroup v1 and v2 that may hold memory limits, from a process's group upwards."""
    for line in cgroup.splitlines():
        number, controllers, path = line.split(":", 2)
        is_v2 = number == "0" and not controllers
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        kind, file = ("cgroup2", "memory.max") if is_v2 else ("cgroup", "memory.limit_in_bytes")
        for root, at, fstype, options in mounts(mountinfo):
            if fstype == kind and holds(root, path) and (is_v2 or "memory" in options.split(",")):
                group = Path(path).relative_to(root)
                yield from (Path(at) / part / file for part in (group, *group.parents))


def limit(file: Path) -> int:
    """Return the bytes that a file limits its group to; at least NO_LIMIT where it does not."""
    text = file.read_text().strip()
    return int(text) if text.isdigit() else NO_LIMIT


def memory_left(files: Iterable[Path]) -> int:
    """Return how many bytes more the groups of some files may use; NO_LIMIT where none has a limit.

    The copies that they keep of files on disk do not count, since the kernel drops them first.
    """
    return min(
        (max(0, limit(file) - _used(file)) for file in files if limit(file) < NO_LIMIT), default=NO_LIMIT
    )


def _used(file: Path) -> int:
    lines = file.with_name("memory.stat").read_text().splitlines()
    stat = {name: int(value) for name, value in (line.split() for line in lines)}
    cached = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in CACHES)  # v1: with groups below it
    return int(file.with_name(USED[file.name]).read_text()) - cached


def mounts(mountinfo: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the root, place, type and options of each file system of /proc/self/mountinfo."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fstype, _, options = right.split(" ")[:3]
        yield left.split(" ")[3], left.split(" ")[4], fstype, options


def holds(at: str, place: str) -> bool:
    """Return whether a path is another one or lies below it."""
    return place == at or place.startswith(at.rstrip("/") + "/")
