"""A foreground run whose launcher is killed: nothing may be left."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_swe.processes import descendants, start_time
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic
from tests.kit.run_processes import processes_of, temporary
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def adopted() -> Iterator[Callable[[], list[int]]]:
    """Who of our descendants has come since and lives, orphans too: they become children of this process."""
    before, libc = set(descendants(os.getpid())), ctypes.CDLL(None)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield lambda: [pid for pid in descendants(os.getpid()) if pid not in before and start_time(pid)]
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_killed_launcher_leaves_no_process_mount_or_temporary_file(
    small_words, warm_model, tmp_path, adopted
):
    scratch, root = tmp_path / "tmp", tmp_path / "run"
    scratch.mkdir()
    words = [*small_words, f"model={warm_model}", "steps=1000", "executor.foreground=true"]
    line = [sys.executable, "-m", "hpc_swe.launch", "start", "configs/demo.toml", *words, "--run", str(root)]
    launcher = subprocess.Popen([*line, "--wait", "1200"], env={**os.environ, "TMPDIR": str(scratch)})
    run = RunDir(root)
    try:
        until(lambda: launcher.poll() or run.archives.is_dir() and atomic.names(run.archives), "a batch", 900)
        assert launcher.poll() is None, "the launcher ended by itself"
        files = temporary(adopted()) - {scratch}
        assert {path.parent for path in files} >= {Path("/dev/shm")}
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    until(lambda: not adopted(), "the end of all processes, FUSE daemons too,")
    assert processes_of(root) == []
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    assert [path for path in files if path.exists()] == []
    # torch keeps one cache folder a user, empty here; it is no run's.
    assert [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor_")] == []
