"""The demonstration's loop on a real Slurm, with the real vLLM and Megatron, requeued in the middle."""

import json
import os
import shutil
import sys
import time
from collections import Counter

import msgspec
import pytest

from hpc_swe.base.records import MetricLine
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, submissions, weights
from tests.kit.checkout import ROOT
from tests.kit.cluster.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
STEPS = 12
DEADLINE_S = 2700.0  # ends what hangs
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def launch(cluster: Cluster, *words: str):
    command = [sys.executable, "-m", "hpc_swe.launch", *words]
    return cluster.run(*command, cwd=ROOT, env=ENVIRONMENT)


def interrupt(cluster: Cluster, role: str) -> bool:
    """What preemption does to a role: its jobs are warned, and requeue themselves. False where none runs."""
    found = [job for job in cluster.jobs() if job.name.startswith(f"{role}:") and job.state == "RUNNING"]
    for job in found:
        cluster.run("scancel", "--batch", "--signal=USR2", job.id)
    return bool(found)


@pytest.fixture(scope="module")
def trained(cluster, warm_model):
    """A finished run that was interrupted twice."""
    cluster.repair()
    folder = cluster.shared / "training"
    shutil.copytree(warm_model, folder / "model")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 2001, 2001)
    run = RunDir(folder / "run")
    words = [f"model={folder / 'model'}", f"steps={STEPS}", "tasks.train=256", "tasks.eval=8", "eval.every=0"]
    files = ["configs/demo.toml", "configs/slurm_demo.toml"]
    launch(cluster, "start", *files, *words, "--run", str(run.root))
    waiting, deadline = {3: "learner", 6: "coordinator"}, time.monotonic() + DEADLINE_S
    while not run.finished.exists():
        assert time.monotonic() < deadline, launch(cluster, "tick", str(run.root)).stdout
        version = weights.newest(run)
        for step in [step for step in waiting if version and version.step >= step]:
            if interrupt(cluster, waiting[step]):
                del waiting[step]
        launch(cluster, "tick", str(run.root))
        time.sleep(5.0)
    cluster.wait_for("an empty queue", lambda: not cluster.jobs())
    return cluster, run


def lines(run: RunDir, role: str) -> dict[str, list[MetricLine]]:
    """Owner -> what it measured."""
    return {
        path.stem: [msgspec.json.decode(text, type=MetricLine) for text in path.read_bytes().splitlines()]
        for path in sorted(run.metrics.glob(f"{role}-*.jsonl"))
    }


def test_reward_rises(trained):
    _, run = trained
    rewards = {
        line.step: line.values["reward/mean"]
        for told in lines(run, "coordinator").values()
        for line in told
        if "reward/mean" in line.values
    }
    curve = [rewards[step] for step in sorted(rewards)]
    print("reward", " ".join(f"{reward:.2f}" for reward in curve))
    assert len(curve) == STEPS
    assert sum(curve[-4:]) > sum(curve[:4]) + 0.1  # mostly by 1 or more


def test_interrupted_roles_went_on_without_repeating_a_step(trained):
    _, run = trained
    learners = lines(run, "learner")
    assert len(learners) >= 2
    taken = Counter(line.step for told in learners.values() for line in told if "policy/loss" in line.values)
    assert taken == Counter(range(STEPS))
    assert len(lines(run, "coordinator")) >= 2


def test_tensorboard_shows_one_curve(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, run = trained
    accumulator = EventAccumulator(str(run.tensorboard)).Reload()
    assert [event.step for event in accumulator.Scalars("reward/mean")] == list(range(STEPS))


def test_learner_ran_on_two_nodes_and_the_other_roles_where_asked(trained):
    cluster, run = trained
    words = ("--allocations", "--noheader", "--parsable2", "--starttime=now-1days")  # not only today's
    rows = cluster.run("sacct", *words, "--format=JobName,NNodes").stdout.splitlines()
    name = json.loads(run.manifest.read_text())["run_id"]
    asked = {"learner": (2, 1), "inference": (1, 2), "rollout": (1, 4), "reward": (1, 2)}
    wanted = {f"{role}:{name}|{nodes}": count for role, (nodes, count) in asked.items()}
    assert Counter(wanted) <= Counter(rows)


@pytest.mark.parametrize(("role", "jobs"), [("inference", 2), ("rollout", 4), ("reward", 2)])
def test_role_that_nobody_interrupted_was_submitted_once(trained, role, jobs):
    """All the ticks found it whole. What a slow sbatch let a tick void was to be submitted again."""
    _, run = trained
    taken = {int(name) for name in atomic.names(run.launches / role) if name.isdecimal()}
    kept = {number for number in taken if not run.marked(role, number, submissions.VOID).exists()}
    noted = [(each.number, each.note.count) for each in submissions.history(run, role, len(taken))]
    assert [(number, count) for number, count in noted if number in kept] == [(max(taken), jobs)]
    assert len(kept) == 1


def test_finished_run_is_left_alone(trained):
    cluster, run = trained
    assert "submitted nothing" in launch(cluster, "tick", str(run.root)).stdout
    assert cluster.jobs() == []
