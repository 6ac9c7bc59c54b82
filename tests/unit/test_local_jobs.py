"""Jobs as processes of this machine, and their end."""

import os
import subprocess
import sys
from pathlib import Path

from waiting import until

from hpc_swe.plugins.executors.local import Local
from hpc_swe.processes import start_time

FORKS = """
import os, sys, time
for number in range(3000):
    if not os.fork():
        time.sleep(600)
    if number == 20:
        open(sys.argv[1], "w")
    time.sleep(0.001)
time.sleep(600)
"""


def those_of(path: Path) -> list[int]:
    """Living processes that have `path` on their command line."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            is_its = os.fsencode(path) in Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue  # it has just ended
        if is_its and start_time(int(pid)):
            found.append(int(pid))
    return found


def test_job_that_goes_on_having_children_ends_with_all_of_them(tmp_path):
    mark = tmp_path / "mark"
    root = subprocess.Popen([sys.executable, "-c", FORKS, str(mark)])
    until(mark.exists)
    Local().cancel([f"{root.pid}:{start_time(root.pid)}"])
    left = those_of(mark)
    for pid in left:
        os.kill(pid, 9)
    assert (left, root.wait()) == ([], -9)
