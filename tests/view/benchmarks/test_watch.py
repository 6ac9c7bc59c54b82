"""The watch reads what nvidia-smi prints, which a driver that hangs may hold."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_swe.cluster.processes import start_time
from hpc_swe.view.benchmarks import watch
from tests.kit.checkout import ROOT, environment
from tests.kit.waiting import until


def nvidia_smi(folder: Path, *lines: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ("exec sleep 60", "nvidia-smi has printed nothing for 2 s"),
        ("exit 9", "nvidia-smi has ended with exit code 9"),
    ],
)
def test_the_watch_says_why_it_sees_gpus_no_more(tmp_path, last, why):
    """Else the share of idle time would be that of a part of the run, and nobody would know."""
    looks = []
    lines = ("echo 0, [Unknown Error], [N/A]", "echo a driver of another version", "echo 1, 50, 2048")
    said = watch.follow_gpus(nvidia_smi(tmp_path, *lines, last), looks.append, 2.0)
    assert said.startswith(f"GPUs are watched no more: {why}; ")
    assert [(look.gpu, look.busy, look.gib) for look in looks] == [("1", 0.5, 2.0)]


def test_a_hanging_nvidia_smi_ends_with_the_watch(tmp_path):
    note = tmp_path / "pid"
    nvidia_smi(tmp_path, "trap '' INT TERM", f"echo $$ > {note}", "exec sleep 60")
    words = ["-m", "hpc_swe.benchmarks.watch", tmp_path, "--out", tmp_path / "looks"]
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    command = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env)
    try:
        until(lambda: note.exists() and note.read_text(), "the start of nvidia-smi")
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == 130
    finally:
        command.kill()
    until(lambda: start_time(int(note.read_text())) is None, "the end of nvidia-smi", 20.0)
