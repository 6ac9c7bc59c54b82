"""A foreground run whose launcher is killed: nothing may be left."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_processes import processes_of

from hpc_swe.processes import descendants, start_time
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic

pytestmark = pytest.mark.slow
GRACE_S = 40.0
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def adopted() -> Iterator[Callable[[], list[int]]]:
    """Who of our descendants has come since and lives, orphans too: they become children of this process."""
    before, libc = set(descendants(os.getpid())), ctypes.CDLL(None)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield lambda: [pid for pid in descendants(os.getpid()) if pid not in before and start_time(pid)]
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def temporary() -> set[Path]:
    """Shared memory, and the folders of sockets where TMPDIR is too long for them."""
    return {*Path("/dev/shm").iterdir(), *Path("/tmp").glob("hpc_swe-*")}


def forsaken(files: set[Path]) -> list[Path]:
    """Those that nobody on this machine uses; what other runs have in use is no business of ours."""
    used = Path("/proc/net/unix").read_text()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            used += (process / "maps").read_text()
            used += "".join(str(file.readlink()) for file in (process / "fd").iterdir())
    return [path for path in files if str(path) not in used]


def test_killed_launcher_leaves_no_process_mount_or_temporary_file(
    small_words, warm_model, tmp_path, adopted
):
    scratch, root = tmp_path / "tmp", tmp_path / "run"
    scratch.mkdir()
    before = temporary()
    words = [*small_words, f"model={warm_model}", "steps=1000", "executor.foreground=true"]
    line = [sys.executable, "-m", "hpc_swe.launch", "start", "configs/demo.toml", *words, "--run", str(root)]
    launcher = subprocess.Popen([*line, "--wait", "600"], env={**os.environ, "TMPDIR": str(scratch)})
    run = RunDir(root)
    try:
        deadline = time.monotonic() + 300
        while not (run.archives.is_dir() and atomic.names(run.archives)):
            assert time.monotonic() < deadline, "no batch was trained"
            assert launcher.poll() is None, "the launcher ended by itself"
            time.sleep(0.2)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    deadline = time.monotonic() + GRACE_S
    while left := adopted():  # FUSE daemons among them
        assert time.monotonic() < deadline, f"left running: {left}, {processes_of(root)}"
        time.sleep(0.2)
    assert processes_of(root) == []
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    assert forsaken(temporary() - before) == []
    # torch keeps one cache folder a user, empty here; it is no run's.
    assert [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor_")] == []
