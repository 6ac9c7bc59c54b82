"""What cron does to a run on a real Slurm: by whom jobs are submitted, how often, and when not."""

import json
import os
import signal
import stat
import sys

import pytest

from tests.kit.checkout import ROOT
from tests.kit.cluster.bench import COUNTED, KILL_TICK, Bench
from tests.kit.cluster.hosts import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def test_tick_of_two_hundred_workers_asks_once(bench):
    run = bench(200, 'executor.options={begin="now+1hour"}')
    run.start()
    assert run.asked() == dict.fromkeys(COUNTED, 0) | {"squeue": 1, "sbatch": 1}
    assert len(run.jobs()) == 200
    run.tick()
    assert run.asked() == dict.fromkeys(COUNTED, 0) | {"squeue": 1}
    run.cluster.run("scancel", *run.jobs()[:50])
    assert "50 reward" in run.tick().stdout
    assert run.asked() == dict.fromkeys(COUNTED, 0) | {"squeue": 1, "sbatch": 1}


def test_eight_ticks_at_once_submit_once(bench):
    run = bench(3, 'executor.options={begin="now+1hour"}')
    run.start()
    for _ in range(3):
        run.cluster.run("scancel", *run.jobs())
        run.cluster.wait_for("an empty queue", lambda: not run.jobs())
        command = [sys.executable, "-m", "hpc_swe.launch", "tick", str(run.run)]
        ticks = [run.cluster.popen(*command, cwd=ROOT) for _ in range(8)]
        assert [tick.wait(PATIENCE_S) for tick in ticks] == [0] * 8
        run.tick()
        run.tick()  # what a slow one took and a quick one doubted is settled by now
        assert len(run.jobs()) == 3


@pytest.mark.parametrize("moment", ["before", "after"])
def test_login_node_that_dies_at_sbatch_costs_no_job_and_doubles_none(bench, moment):
    run = bench(2, 'executor.options={begin="now+1hour"}')
    real = '/usr/bin/sbatch "$@"; ' if moment == "after" else ""
    (run.bin / "sbatch").write_text(f"#!/bin/sh\n{real}{KILL_TICK}\n")
    died = run.launch(
        "start", "configs/demo.toml", f"model={run.model}", *run.words, "--run", str(run.run), check=False
    )
    assert died.returncode == -signal.SIGKILL
    (run.bin / "sbatch").unlink()
    assert len(run.jobs()) == (2 if moment == "after" else 0)
    ticks = 1 if moment == "after" else 2
    for _ in range(ticks):
        run.tick()
    assert len(run.jobs()) == 2
    run.tick()
    assert len(run.jobs()) == 2


def test_controller_that_does_not_answer_is_one_line_and_submits_nothing(bench):
    run = bench(1, 'executor.options={begin="now+1hour"}')
    run.start()
    run.cluster.daemon_kill("slurmctld", signal.SIGTERM)
    try:
        done = run.tick(check=False)
    finally:
        run.cluster.daemon_start("slurmctld")
    assert done.returncode == 6
    assert done.stderr.strip().splitlines()[-1].startswith("error: squeue: ")
    assert [name for name in os.listdir(run.run / "launch/reward") if name.isdecimal()] == ["000001"]


def test_refusal_of_sbatch_names_the_role_and_the_keys(bench):
    run = bench(1, 'executor.roles.reward.partition="nowhere"')
    done = run.launch(
        "start", "configs/demo.toml", f"model={run.model}", *run.words, "--run", str(run.run), check=False
    )
    assert done.returncode != 0
    assert f"{run.run}: reward: sbatch refuses it: " in done.stderr
    assert "invalid partition" in done.stderr
    assert "see [executor] partition, account, options and roles" in done.stderr


def test_python_that_jobs_cannot_run_is_left_alone_after_three_submissions(bench):
    run = bench(1)
    run.start()
    code = run.run / "code" / "jobs"
    run.cluster.wait_for("a start", lambda: list(run.run.glob("launch/reward/000001/job_*.json")))
    (code / "run.py").write_text("raise SystemExit(9)")
    run.cluster.run("scancel", *run.jobs())
    for _ in range(3):
        run.cluster.wait_for("an empty queue", lambda: not run.jobs())
        run.tick()
    run.cluster.wait_for("an empty queue", lambda: not run.jobs())
    run.asked()
    done = run.cluster.wait_for("the book", lambda: _stuck(run), every=10)  # it lags by 5 s
    assert "last 3 submissions failed (FAILED 9:0" in done.stderr
    assert run.asked()["sacct"] >= 1


def _stuck(run: Bench):
    done = run.tick(check=False)
    return done if "last 3 submissions failed" in done.stderr else None


def test_warned_elements_of_an_array_requeue_themselves_alone(bench):
    run = bench(3)
    run.start()
    nodes = run.run / "nodes"
    owners = lambda: {path.stem for path in nodes.glob("reward-*.json")}  # noqa: E731
    run.cluster.wait_for("live workers", lambda: len(owners()) == 3)
    for index in (2, 0):  # the last bears the id of the whole array
        before = owners()
        victim = next(job for job in run.jobs() if job.endswith(f"_{index}"))
        run.cluster.run("scancel", "--batch", "--signal=USR2", victim)
        run.cluster.wait_for("a new owner", lambda before=before: owners() - before)
        assert len(owners() & before) == 2, "the siblings never noticed"
    restarts = {job.id.rpartition("_")[2]: job.restarts for job in run.cluster.jobs()}
    assert [restarts["0"] > 0, restarts["1"] > 0, restarts["2"] > 0] == [True, False, True]


def test_stop_drains_what_runs_and_cancels_what_waits(bench):
    run = bench(2)
    run.start()
    nodes = run.run / "nodes"
    run.cluster.wait_for("live workers", lambda: len(list(nodes.glob("reward-*.json"))) == 2)
    run.launch(
        "start", "configs/demo.toml", f"model={run.model}", *run.words[:-1], "counts.reward=3",
        'executor.options={begin="now+1hour"}', "--run", str(run.run),
    )  # fmt: skip
    assert len(run.jobs()) == 3
    run.launch("stop", str(run.run))
    run.cluster.wait_for("an empty queue", lambda: not run.jobs())
    ended = [json.loads(path.read_text()) for path in run.run.glob("launch/reward/*/job_*.json")]
    assert [job["code"] for job in ended] == [0, 0]
    assert list(nodes.iterdir()) == []
    assert "submitted nothing" in run.tick().stdout


def test_stop_and_start_at_once_lose_no_job_and_leave_no_old_one(bench):
    run = bench(2)
    run.start()
    nodes = run.run / "nodes"
    for slots in (2, 3, 4):
        run.cluster.wait_for("live workers", lambda: len(list(nodes.glob("reward-*.json"))) == 2)
        old = run.jobs()
        run.launch("stop", str(run.run))
        run.launch("start", "--run", str(run.run), f"reward.slots={slots}")
        assert len(run.jobs()) == 2
        assert set(run.jobs()).isdisjoint(old)
    assert "submitted nothing" in run.tick().stdout


def test_jobs_that_wait_when_the_run_has_finished_leave_the_queue(bench):
    run = bench(3, 'executor.options={begin="now+1hour"}')
    run.start()
    run.cluster.run("scontrol", "hold", run.jobs()[0])
    os.mknod(run.run / "control/FINISHED")
    run.asked()
    assert "submitted nothing, cancelled 3: the run has finished" in run.tick().stdout
    assert run.asked() == dict.fromkeys(COUNTED, 0) | {"squeue": 1, "scancel": 1}
    run.cluster.wait_for("an empty queue", lambda: not run.jobs())


def test_job_asks_for_what_the_configuration_says(bench):
    run = bench(1, 'executor.options={begin="now+1hour", "mail-type"="FAIL"}', "executor.notice_s=45")
    run.start()
    shown = run.cluster.run("scontrol", "show", "job", run.jobs()[0].partition("_")[0]).stdout
    for wanted in ("Requeue=1", "Comment=1", "TimeLimit=00:10:00", "CPUs/Task=1", "ArrayTaskId=0"):
        assert wanted in shown
    name = json.loads((run.run / "MANIFEST.json").read_text())["run_id"]
    assert f"JobName=reward:{name}" in shown


def test_run_is_private_and_nobody_else_can_act_on_it(bench):
    run = bench(1, 'executor.options={begin="now+1hour"}')
    run.start()
    assert stat.S_IMODE(run.run.stat().st_mode) == 0o700
    command = [sys.executable, "-m", "hpc_swe.launch", "tick", str(run.run)]
    done = run.cluster.run(*command, user="bob", cwd=ROOT, check=False)
    assert done.returncode != 0
    assert len(run.jobs()) == 1
