"""What is asked of Slurm, without one."""

import re
from pathlib import Path

import pytest

from hpc_swe.base.errors import ConfigError, SchedulerError
from hpc_swe.base.records import RunManifest
from hpc_swe.base.rundir import PROTOCOL, RunDir
from hpc_swe.base.store import atomic
from hpc_swe.cluster.executors.base import Submission
from hpc_swe.cluster.executors.slurm import Resources, Slurm
from tests.kit.constants import varied

RUN = RunDir(Path("/shared/run"))


def submission(role="rollout", count=4, processes=1):
    return Submission("demo-a1b2c3", role, 7, count, processes, ["python", "-m", "jobs.run", role, "a b"])


def script(executor=None, **words) -> list[str]:
    return (executor or Slurm()).script(RUN, submission(**words)).splitlines()


def test_workers_are_one_array_requeued_and_warned_at_the_batch_shell():
    lines = script(Slurm(notice_s=90, partition="cpu", account="lab"))
    for wanted in ("array=0-3", "signal=B:USR2@90", "partition=cpu", "account=lab", "comment=7"):
        assert f"#SBATCH --{wanted}" in lines
    assert "#SBATCH --requeue" in lines
    assert "#SBATCH --output=/shared/run/logs/rollout/%A_%a.log" in lines
    assert "#SBATCH --job-name=rollout:demo-a1b2c3" in lines


def test_shell_makes_way_for_the_command_which_is_quoted():
    lines = script()
    assert "trap '' USR2" in lines
    assert lines[-1] == "exec python -m jobs.run rollout 'a b' --notice 120"


@pytest.mark.parametrize("role", ["coordinator", "learner"])
def test_single_roles_are_no_array_and_never_run_twice(role):
    lines = script(role=role, count=1)
    assert "#SBATCH --dependency=singleton" in lines
    assert not any("array" in line for line in lines)


def test_processes_of_a_learner_are_divided_among_its_nodes():
    executor = Slurm(roles={"learner": Resources(nodes=2, gpus_per_node=4, cpus_per_task=8, mem_gb=100.5)})
    lines = script(executor, role="learner", count=1, processes=8)
    for wanted in ("nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=8", "mem=102912M"):
        assert f"#SBATCH --{wanted}" in lines


def test_options_of_a_role_win_over_those_of_all():
    executor = Slurm(
        options={"qos": "long", "nice": 5}, roles={"rollout": Resources(options={"qos": "short"})}
    )
    lines = script(executor)
    assert "#SBATCH --qos=short" in lines
    assert "#SBATCH --nice=5" in lines


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ["gpus-per-node=4", "mem=4096M"]),
        ({"gres": "gpu:h100:2"}, ["gres=gpu:h100:2", "mem=4096M"]),
        ({"gres": "lustre:1"}, ["gpus-per-node=4", "gres=lustre:1", "mem=4096M"]),
        ({"gpus_per_node": "h100:2"}, ["gpus-per-node=h100:2", "mem=4096M"]),
        ({"gpus-per-task": 1}, ["gpus-per-task=1", "mem=4096M"]),
        ({"gpus-per-node": False}, ["mem=4096M"]),
        ({"tres-per-task": "cpu:4"}, ["gpus-per-node=4", "mem=4096M", "tres-per-task=cpu:4"]),
        ({"mem_per_cpu": "4G"}, ["gpus-per-node=4", "mem-per-cpu=4G"]),
        ({"mem": ""}, ["gpus-per-node=4"]),
        ({"mem-bind": "local"}, ["gpus-per-node=4", "mem-bind=local", "mem=4096M"]),
    ],
)
def test_options_replace_the_gpus_and_the_memory_of_a_role(options, wanted):
    """Slurm refuses GPUs with and without a kind, and two options for the memory."""
    lines = script(Slurm(roles={"inference": Resources(gpus_per_node=4, options=options)}), role="inference")
    words = [
        line.removeprefix("#SBATCH --") for line in lines if re.match("#SBATCH --(gpus|gres|mem|tres)", line)
    ]
    assert sorted(words) == wanted


def test_false_leaves_an_option_out_and_zero_does_not():
    lines = script(Slurm(options={"requeue": False, "nice": 0, "exclusive": True}))
    assert not any("requeue" in line for line in lines)
    assert {"#SBATCH --nice=0", "#SBATCH --exclusive"} <= {*lines}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("clusters", r"options.clusters: set cluster of \[executor\] in its place"),
        ("cpus_per_task", "set roles.NAME.cpus_per_task"),
        ("job_name", "options.job-name: hpc_swe sets this option itself"),
        ("array", "hpc_swe sets this option itself"),
    ],
)
def test_options_that_would_hide_jobs_or_change_another_key_are_refused(name, says):
    """With another name or cluster no tick would find the jobs, and each would submit them again."""
    with pytest.raises(ConfigError, match=says):
        Slurm(options={name: "x"})
    with pytest.raises(ConfigError, match=r"roles.reward.options"):
        Slurm(roles={"reward": Resources(options={name: "x"})})


def test_walltime_too_short_for_the_notice_is_refused_with_both_keys():
    executor = Slurm(notice_s=90, roles={"reward": Resources(timeout_min=2)})
    with pytest.raises(ConfigError, match=r"roles.reward.timeout_min = 2 is too short for notice_s = 90"):
        executor.check(submission("reward"))
    executor.check(submission("rollout"))


@pytest.mark.parametrize("name", ["p50%u", "back\\slash"])
def test_folder_that_slurm_would_misread_is_refused(name):
    asked = Submission("demo", "reward", 1, 1, 1, ["python", "-m", "jobs.run", "reward", f"/shared/{name}"])
    with pytest.raises(ConfigError, match="name another folder with --run"):
        Slurm().check(asked)


def test_ranks_that_do_not_divide_among_the_nodes_are_refused():
    executor = Slurm(roles={"learner": Resources(nodes=3)})
    with pytest.raises(ConfigError, match=r"roles.learner.nodes = 3 does not divide the 8 processes"):
        executor.check(submission("learner", 1, 8))


def test_commands_of_slurm_that_hang_end_at_the_deadline(tmp_path, monkeypatch):
    for name in ("srun", "sbatch", "scancel"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'sbatch: error: retrying' >&2; exec sleep 600\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    slurm = varied(Slurm, answer_s=0.5)()
    with pytest.raises(SchedulerError, match=r"sbatch: no answer in 0.5 s"):
        slurm.submit(RunDir(tmp_path / "run"), submission())
    with pytest.raises(SchedulerError, match=r"scancel: no answer in 0.5 s"):
        slurm.cancel(["7"])


def test_a_killed_sbatch_is_not_called_late_and_its_submission_stays_open(tmp_path, monkeypatch):
    for name, does in (("srun", ""), ("sbatch", "kill -9 $PPID $$")):  # PPID is timeout
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SchedulerError, match="sbatch: killed by signal 9"):  # a refusal would give it back
        Slurm().submit(RunDir(tmp_path / "run"), submission())


def test_all_commands_ask_the_same_cluster_whatever_the_shell_says(tmp_path, monkeypatch):
    """Else a tick would not find the jobs, and each would submit them again."""
    for name in ("srun", "sbatch", "squeue", "sacct", "scancel"):
        also = "${SBATCH_CLUSTERS-}" if name == "sbatch" else ""
        told = f'echo "{name} $* of ${{SLURM_CLUSTERS-}}{also}" >> {tmp_path}/told'
        (tmp_path / name).write_text(f"#!/bin/sh\n{told}\necho Submitted batch job 7 on cluster gpu\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for variable in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS"):
        monkeypatch.setenv(variable, "other")
    run, slurm = RunDir(tmp_path / "run"), Slurm(cluster="gpu")
    run.make()
    words = {"commit": "", "model_sha256": "", "config_sha256": "", "folder": "/", "environment": {}}
    atomic.put(run.manifest, RunManifest(protocol=PROTOCOL, run_id="demo-a1b2c3", **words))
    assert slurm.submit(run, submission()) == "7"
    assert slurm.queue(run) == []
    slurm.endings(["7"])
    slurm.cancel(["7"])
    told = (tmp_path / "told").read_text().splitlines()
    assert [line.split()[0] for line in told] == ["sbatch", "squeue", "sacct", "scancel"]
    assert all(line.endswith(" of ") for line in told)
    assert all("--clusters=gpu" in line for line in told[1:])
    assert "#SBATCH --clusters=gpu" in script(slurm)


@pytest.mark.parametrize(
    "message",
    [
        "Unable to contact slurm controller (connect failure)",
        "Socket timed out on send/recv operation",
        "Zero Bytes were transmitted or received",
        "Slurm backup controller in standby mode",
        "Connection refused",
        "Message receive failure",
        "Invalid authentication credential",
    ],
)
def test_a_controller_that_is_away_for_a_moment_has_refused_nothing(tmp_path, monkeypatch, message):
    """It may have accepted the job: a submission that is given back would be submitted twice."""
    with pytest.raises(SchedulerError, match=f"no clear answer: sbatch: error: .* {re.escape(message)}$"):
        submit_answered(tmp_path, monkeypatch, f"Batch job submission failed: {message}")


@pytest.mark.parametrize(
    "message", ["invalid partition specified", "AssocMaxSubmitJobLimit", "Required partition not available"]
)
def test_a_refusal_is_told_with_the_keys_that_it_may_be_about(tmp_path, monkeypatch, message):
    with pytest.raises(ConfigError, match=r"sbatch refuses it: .*; see \[executor\] partition, account"):
        submit_answered(tmp_path, monkeypatch, message)


def submit_answered(folder, monkeypatch, message):
    """Submit where sbatch fails with this message."""
    for name, does in (("srun", ""), ("sbatch", f"echo 'sbatch: error: {message}' >&2; exit 1")):
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    Slurm().submit(RunDir(folder / "run"), submission())


def test_machine_without_slurm_is_one_error_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no srun on PATH; submit from a login node"):
        Slurm().submit(RunDir(tmp_path / "run"), submission())
    assert not (tmp_path / "run").exists()
