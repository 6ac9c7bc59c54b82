"""A foreground run whose launcher is killed: nothing may be left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_processes import processes_of

from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic

pytestmark = pytest.mark.slow
GRACE_S = 40.0


def fuse_daemons() -> set[str]:
    return {path.name for path in Path("/proc").glob("[0-9]*") if b"squashfuse" in _words(path)}


def _words(path: Path) -> bytes:
    try:
        return (path / "cmdline").read_bytes()
    except OSError:
        return b""


def test_killed_launcher_leaves_no_process_mount_or_temporary_file(small_words, warm_model, tmp_path):
    scratch, root = tmp_path / "tmp", tmp_path / "run"
    scratch.mkdir()
    engines = set(Path("/tmp").glob("hpc_swe-*"))  # where they go when TMPDIR is too long for a socket
    daemons, mounts = fuse_daemons(), Path("/proc/self/mounts").read_text()
    shared = set(os.listdir("/dev/shm"))
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
    while processes_of(root):
        assert time.monotonic() < deadline, f"left running: {processes_of(root)}"
        time.sleep(0.2)
    assert fuse_daemons() <= daemons
    assert Path("/proc/self/mounts").read_text() == mounts
    assert set(os.listdir("/dev/shm")) <= shared
    assert set(Path("/tmp").glob("hpc_swe-*")) <= engines
    # torch keeps one cache folder a user, empty here; it is no run's.
    assert [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor_")] == []
