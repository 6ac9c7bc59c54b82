"""The scripts of sbatch/ on a real Slurm: a job that submits jobs, and what cron takes."""

import json
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_swe.base.rundir import RunDir
from hpc_swe.cluster.executors.base import Submission
from hpc_swe.cluster.executors.slurm import Resources, Slurm
from tests.kit.checkout import ROOT
from tests.kit.constants import empty_model

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
ROLES = ["coordinator", "inference", "learner", "rollout"]
NOBODY = [f"counts.{role}=0" for role in ROLES]
EXECUTOR = (
    'executor={type="slurm", notice_s=20, roles={reward={cpus_per_task=1, mem_gb=0.2, timeout_min=10}}}'
)


@pytest.fixture
def folder(healthy_cluster):
    made = Path(tempfile.mkdtemp(dir=healthy_cluster.shared))
    empty_model(made / "model")
    for split in ("train", "eval"):
        files = [{"path": "test.py", "content": f"def test_{split}(): assert 1 == 1"}]
        rows = [{"task_id": split, "problem_statement": "", "extra_info": {"files": files}}]
        pq.write_table(pa.Table.from_pylist(rows), made / f"{split}.parquet")
    for path in (made, *made.rglob("*")):
        os.chown(path, 2001, 2001)
    return made


def test_a_launcher_job_submits_jobs_that_take_nothing_for_their_own(healthy_cluster, folder):
    cluster = healthy_cluster
    rows = f'taskset={{type="kodcode", train="{folder}/train.parquet", eval="{folder}/eval.parquet"}}'
    words = [*NOBODY, "counts.reward=2", EXECUTOR, 'sandbox={type="process"}', rows]
    variables = {"SWE_PDB_MODEL_PATH": folder / "model", "SWE_PDB_CHECKPOINT_BASE": folder, "N_PARALLEL": 4}
    exports = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
    options = ["--wait", "--mem=500M", "--ntasks=3", "--partition=gpu", "--gpus=1", f"--export={exports}"]
    log = f"--output={folder}/launcher.log"
    cluster.run("sbatch", *options, log, "sbatch/train_swepdb_4b.sbatch", *words, cwd=ROOT)

    run = RunDir(folder / "swepdb_4b")
    assert "submitted 2 reward" in (folder / "launcher.log").read_text()
    assert json.loads(run.config.read_text())["groups"]["group_size"] == 4

    def watchdogs():
        nodes = {job.nodes for job in cluster.jobs() if job.nodes}
        found = [each for node in nodes for each in cluster.processes(node)]
        return [each for each in found if f"jobs.run reward {run.root}" in " ".join(each.arguments)]

    both = cluster.wait_for("two reward jobs", lambda: found if len(found := watchdogs()) == 2 else [])
    for watchdog in both:
        lines = Path(f"/proc/{watchdog.pid}/environ").read_bytes().decode().split("\0")
        found = dict(line.split("=", 1) for line in lines if "=" in line)
        assert found["SLURM_JOB_NAME"].startswith("reward:")
        assert found["SLURM_NTASKS_PER_NODE"] == "1"
        assert [name for name in found if "GPU" in name or name == "CUDA_VISIBLE_DEVICES"] == []
        assert found.get("SLURM_NTASKS", "1") == "1"
    stop = [ROOT / ".venv/bin/python", "-m", "hpc_swe.launch", "stop", str(run.root), "--now"]
    cluster.run(*map(str, stop), cwd=ROOT)


OPTIONS = [
    {},
    {"gres": "gpu:h100:2"},
    {"gpus_per_node": "h100:2"},
    {"gpus": 2},
    {"gpus-per-task": 1},
    {"mem-per-cpu": "500M"},
    {"mem_per_gpu": "1G"},
    {"mem": False},
    {"requeue": False, "exclusive": True},
]


def test_slurm_takes_the_options_by_which_people_replace_ours(healthy_cluster, folder):
    refused = {}
    for number, options in enumerate(OPTIONS):
        roles = {"inference": Resources(gpus_per_node=2, mem_gb=1, cpus_per_task=1, options=options)}
        asked = Submission("demo-a1b2c3", "inference", 1, 1, 1, ["true"])
        text = Slurm(partition="gpu", cluster="hpc", roles=roles).script(RunDir(folder / "run"), asked)
        (folder / f"{number}.sh").write_text(text)
        done = healthy_cluster.run("sbatch", "--test-only", folder / f"{number}.sh", check=False)
        if done.returncode:
            refused[str(options)] = done.stderr
    assert refused == {}


def test_the_example_is_a_table_that_cron_takes(healthy_cluster):
    example = ROOT / "sbatch/crontab.example"
    healthy_cluster.run("crontab", str(example))
    assert healthy_cluster.run("crontab", "-l").stdout == example.read_text()
