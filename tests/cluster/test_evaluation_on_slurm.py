"""An evaluation as arrays of a real Slurm: an interrupt leaves its jobs, and the same command goes on."""

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import msgspec
import pytest

from hpc_swe.view.evaluation.results import Summary
from tests.kit.checkout import ROOT
from tests.kit.cluster.hosts import PATIENCE_S
from tests.kit.small_evaluation import FAILS, SOLVES, environment, make

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
ROLES = ", ".join(
    f"{role}={{cpus_per_task=1, mem_gb=1, timeout_min=10}}"
    for role in ("coordinator", "inference", "rollout", "reward")
)
WORDS = [
    f'executor={{type="slurm", cluster="hpc", partition="cpu", notice_s=20, roles={{{ROLES}}}}}',
    "counts.rollout=2",
]


def test_an_interrupt_leaves_the_jobs_and_the_same_command_finishes(healthy_cluster):
    cluster = healthy_cluster
    small = make(Path(tempfile.mkdtemp(dir=cluster.shared)))
    small.replies(SOLVES, FAILS, delay_s=2.0)  # what is left takes longer than an interrupt
    for path in (small.folder, *small.folder.rglob("*")):
        os.chown(path, 2001, 2001, follow_symlinks=False)
    env = {name: environment()[name] for name in ("PYTHONPATH", "COLUMNS")}
    line = small.command(*WORDS)
    with cluster.popen(*line, cwd=ROOT, env=env, stdout=subprocess.PIPE) as first:
        cluster.wait_for("a first result", lambda: any((small.out.scored / "ready").glob("eval-*")))
        first.send_signal(signal.SIGINT)
        said, _ = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 130, said
    assert "detached; jobs keep running" in said
    assert [path.name for path in small.out.control.iterdir() if path != small.out.finished] == []
    states = {job.state for job in cluster.jobs()}
    assert (states and states <= {"PENDING", "RUNNING"}) or small.out.finished.exists()
    done = cluster.run(*line, cwd=ROOT, env=env)
    assert "continued, " in done.stdout
    summary = msgspec.json.decode(small.out.summary.read_bytes(), type=Summary)
    outcomes = summary.decodings["greedy"].outcomes  # two workers share the engine's replies, in any order
    assert sum(outcomes.values()) == 8
    assert "infra_error" not in outcomes
    assert [job for job in cluster.jobs() if job.state == "RUNNING"] == []
