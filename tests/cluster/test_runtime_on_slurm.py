"""A run of a real Slurm from one runtime file, of which each node makes a copy."""

import os
import tempfile
from pathlib import Path

import msgspec
import pytest

from hpc_swe.view.evaluation.results import Summary
from tests.cluster.test_evaluation_on_slurm import ROLES
from tests.kit import runtime
from tests.kit.checkout import ROOT
from tests.kit.small_evaluation import FAILS, SOLVES, environment, make

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def test_jobs_of_a_run_start_from_the_file(healthy_cluster):
    cluster = healthy_cluster
    small = make(Path(tempfile.mkdtemp(dir=cluster.shared)))
    small.replies(SOLVES, FAILS)
    file, nodes = small.folder / "runtime.sqfs", small.folder / "nodes"
    runtime.make_environment(small.folder / "environment", "swebench", "unidiff")
    runtime.pack(small.folder / "environment", file)
    nodes.mkdir()
    for path in (small.folder, *small.folder.rglob("*")):
        os.chown(path, 2001, 2001, follow_symlinks=False)
    slurm = 'executor={type="slurm", cluster="hpc", partition="cpu", notice_s=20, '
    slurm += f'environ={{TMPDIR="{nodes}"}}, runtime="{file}", roles={{{ROLES}}}}}'
    env = {name: environment()[name] for name in ("PYTHONPATH", "COLUMNS")}
    cluster.run(*small.command(slurm, "counts.rollout=2"), cwd=ROOT, env=env)
    summary = msgspec.json.decode(small.out.summary.read_bytes(), type=Summary)
    assert sum(summary.decodings["greedy"].outcomes.values()) == 8
    assert "infra_error" not in summary.decodings["greedy"].outcomes
    imported = {path.parent.name for path in nodes.glob("*/*/hpc_swe/roles/*/__pycache__")}
    assert {"coordinator", "inference", "rollout", "reward"} <= imported, "from the copies of the nodes"
