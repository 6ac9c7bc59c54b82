"""Jobs as processes of this machine: the GPUs that they are given, and their end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, submissions
from hpc_swe.base.store.submissions import Started, Submitted
from hpc_swe.cluster import gpus
from hpc_swe.cluster.executors.base import Submission
from hpc_swe.cluster.executors.local import Local
from hpc_swe.cluster.gpus import choose
from hpc_swe.cluster.processes import start_time, variable
from hpc_swe.config import config as configuration
from hpc_swe.launch import create, plan
from hpc_swe.launch.submit import decide
from tests.kit.checkout import ROOT
from tests.kit.waiting import DEADLINE_S, until

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


CARD = "GPU {number}: NVIDIA H200 (UUID: GPU-{number}f00)"
PARENT = """
import subprocess, sys, time
subprocess.Popen(["sleep", "600"])
time.sleep(600)
"""


@pytest.fixture
def four_gpus(tmp_path, monkeypatch):
    """A machine whose driver lists four."""
    folder = tmp_path / "bin"
    folder.mkdir()
    cards = "\n".join(CARD.format(number=number) for number in range(4))
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<END\n{cards}\nEND\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def submit(run):
    """Submits jobs that sleep, and ends them."""
    begun, numbers = [], {}

    def one(executor, role, *command, note=True, **environment):
        numbers[role] = number = numbers.get(role, 0) + 1
        words = command or ("sleep", "600")
        submissions.take(run, role, number)
        job = executor.submit(run, Submission("run", role, number, 1, 1, words, environment))
        begun.append(job)
        if note:
            atomic.put(run.submitted(role, number), Submitted(job=job, count=1, host="", at=0.0))
        return job

    yield one
    Local().cancel([*begun, *(job.job for job in Local().queue(run))])


def seen(job: str) -> str | None:
    """The GPUs that a job's process sees."""
    return variable(int(job.partition(":")[0]), "CUDA_VISIBLE_DEVICES")


def bearers(run: RunDir) -> set[int]:
    """The processes of the run's jobs."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid for pid in pids if (variable(pid, "HPC_SWE_JOB") or "").endswith(f":{run.root}")}


@pytest.mark.parametrize(
    ("taken", "count", "share", "chosen"),
    [
        ([], 2, False, ["0", "1"]),
        (["0", "2"], 2, False, ["1", "3"]),
        (["0", "2"], 3, False, None),
        (["0", "0", "1", "2"], 2, True, ["3", "1"]),
        ([], 5, True, None),
    ],
)
def test_gpus_are_chosen_among_those_that_the_fewest_others_have(taken, count, share, chosen):
    assert choose(["0", "1", "2", "3"], taken, count, share=share) == chosen


@pytest.mark.parametrize(
    ("visible", "usable"),
    [("2,3", ["2", "3"]), ("", []), ("7", []), ("1,-1,2", ["1"]), ("GPU-2f,GPU-9", ["GPU-2f"])],
)
def test_a_process_can_use_the_gpus_it_is_shown_and_the_machine_has(four_gpus, visible, usable):
    assert gpus.usable({"CUDA_VISIBLE_DEVICES": visible}) == usable


def test_each_job_sees_gpus_of_its_own_and_a_role_without_sees_none(four_gpus, submit):
    executor = Local(gpus={"learner": 2, "inference": 1})
    jobs = [submit(executor, role) for role in ("learner", "inference", "inference", "rollout")]
    assert [seen(job) for job in jobs] == ["0,1", "2", "3", ""]
    with pytest.raises(ConfigError, match=r"gpus.inference = 1: this machine has 4 GPUs.*have 4; set share"):
        submit(executor, "inference")
    executor.cancel([jobs[1]])
    assert seen(submit(Local(gpus={"reward": 1}), "reward")) == "2"


def test_jobs_share_a_gpu_by_configuration_and_use_those_of_the_start(four_gpus, submit):
    executor = Local(gpus={"learner": 1, "inference": 1}, share_gpus=True)
    jobs = [submit(executor, role, CUDA_VISIBLE_DEVICES="3") for role in ("learner", "inference")]
    assert [seen(job) for job in jobs] == ["3", "3"]


def test_a_killed_job_leaves_no_process_that_a_tick_or_stop_does_not_find(run, submit):
    executor = Local()
    job = submit(executor, "learner", sys.executable, "-c", PARENT)
    root = int(job.partition(":")[0])
    until(lambda: len(bearers(run)) == 2)
    [child] = bearers(run) - {root}
    os.kill(child, signal.SIGSTOP)
    os.kill(root, signal.SIGKILL)
    until(lambda: not start_time(root))
    [left] = executor.queue(run)
    assert (left.role, left.state, left.job) == ("learner", "broken", f"{child}:{start_time(child)}")
    assert decide(1, [left], submissions.newest(run, "learner")).cancel == [left.job]
    executor.cancel([left.job])
    assert executor.queue(run) == []


def test_a_job_whose_tick_died_before_noting_it_is_found_not_restarted(run, submit):
    job = submit(Local(), "learner", note=False)
    [found] = Local().queue(run)
    assert (found.job, found.state) == (job, "running")
    decision = decide(1, [found], submissions.newest(run, "learner"))
    assert (decision.missing, decision.close) == (0, job)


def test_a_learner_that_expects_gpus_refuses_where_it_sees_none(run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    words = [f"model={tmp_path}", "policy.device='gpu'", 'sandbox={type="process"}', "tasks.train=1"]
    config = configuration.read(ROOT / "configs/demo.toml", overrides=words)
    (tmp_path / "place").mkdir()
    create.publish(run, RunDir(tmp_path / "place"), config, plan.Taken({}), "")
    line = [sys.executable, "-m", "jobs.run", "learner", str(run.root), "--submission=1"]
    submissions.take(run, "learner", 1)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 7
    assert "learner: the configuration expects 2 GPUs on this node, and 0 can be used" in done.stderr
    assert "policy.device" in done.stderr
    assert atomic.get(run.started("learner", 1, 0), Started).code == 7


def test_a_job_has_a_session_of_its_own_which_no_terminal_interrupts(submit):
    pid = int(submit(Local(), "reward").partition(":")[0])
    assert os.getsid(pid) == pid
