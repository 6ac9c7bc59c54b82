"""A second run of the tests, alone, after one that the host may have spoiled.

It was not done in time, or the kernel killed a process of this job for memory meanwhile, perhaps that of a
neighbour. Second runs are made one at a time, beside the first ones of others. Who cannot begin within the
time of one run is judged by the first: tests that never end may not keep a worker from its other gradings.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
GROUPS = Path("/sys/fs/cgroup")
_one_by_one = threading.Lock()

log = logging.getLogger(__name__)


def kills(groups: Path = GROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Processes that the kernel killed for memory: of this job, or where nobody counts that, of the node."""
    places = [Path("/proc/vmstat")]
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            places.insert(0, groups / "memory" / path.lstrip("/") / "memory.oom_control")
        elif not controllers:
            places.insert(0, groups / path.lstrip("/") / "memory.events")
    for place in places:
        try:
            words = place.read_text().split()
        except OSError:
            continue
        if "oom_kill" in words:
            return int(words[words.index("oom_kill") + 1])
    return 0


def settled(
    run: Callable[[], T], is_late: Callable[[T], bool], wait_s: float, count: Callable[[], int] = kills
) -> T:
    """The outcome of a run, or of the second one when the first is not to be trusted."""
    before = count()
    first = run()
    late, killed = is_late(first), count() > before
    if not late and not killed:
        return first
    if not _one_by_one.acquire(timeout=wait_s):
        log.warning("judged by a first run: second runs of others took longer than %g s", wait_s)
        return first
    try:
        log.info("second run: the first %s", "was late" if late else "may have lost a process to the kernel")
        return run()
    finally:
        _one_by_one.release()
