"""Each fault is made on a real cluster, and the doctor names it. What it finds well is well here too."""

import json
import shlex
import sys

import pytest

from tests.kit.checkout import ROOT
from tests.kit.cluster.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

CPU = "partition cpu"
NEGLECTED = {
    "JobRequeue": "0",
    "MaxArraySize": "4",
    "SlurmctldParameters": "",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/linux",
}


TIMED = {("rename", "warning"), ("rename latency", "warning")}


class Report:
    """What the doctor said: findings by check and place."""

    def __init__(self, code, output):
        self.code = code
        self.found = {(each["check"], each["where"]): each for each in json.loads(output)}

    def verdict(self, check, where="cluster"):
        return self.found[check, where]["verdict"]

    def says(self, check, where="cluster"):
        return self.found[check, where]["says"]

    def remedy(self, check, where="cluster"):
        return self.found[check, where]["remedy"]

    def not_well(self):
        """Without what a loaded machine is warned of."""
        told = {(check, each["verdict"]) for (check, _), each in self.found.items()}
        return {check for check, verdict in told - TIMED if verdict != "ok"}


def doctor(cluster, *words, **options):
    place = [] if "--shared" in words else ["--shared", cluster.shared]
    command = [sys.executable, "-m", "hpc_swe.doctor", "--json", "--timeout", "300", *place, *words]
    done = cluster.run(*command, cwd=ROOT, check=False, **options)
    assert done.returncode in (0, 1), done.stderr
    return Report(done.returncode, done.stdout)


def broken(cluster, fault):
    """An interpreter for jobs on which node c2 has a fault."""
    path = cluster.shared / fault
    words = [sys.executable, str(ROOT / "tests/kit/cluster/broken_node.py"), fault]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)
    return path


def test_on_a_good_cluster_nothing_but_the_small_tmp_is_found(healthy_cluster):
    report = doctor(healthy_cluster, "--partition", "cpu")
    assert report.not_well() == {"node-local /tmp"}
    assert report.code == 0
    assert report.says("shared folder", CPU) == "can be read and written by all nodes"
    assert not list(healthy_cluster.shared.glob(".doctor-*")), "the folder of the meeting was left"
    healthy_cluster.wait_for("its job to be gone", lambda: not healthy_cluster.jobs())


def test_a_neglected_cluster_is_told_all_its_settings(cluster):
    config = configured(counts__rollout=8, sandbox='{type="process"}', executor='{type="slurm"}')
    with Cluster.start(nodes=("c1", "c2"), settings=NEGLECTED) as neglected:
        report = doctor(neglected, "--partition", "preemptible", "--partition", "preemptcancel", *config)
    requeue, cancel = "partition preemptible", "partition preemptcancel"
    assert report.code == 1
    assert "JobRequeue=0" in report.says("JobRequeue")
    assert report.says("MaxArraySize") == "MaxArraySize=4, and an array of 8 jobs is needed"
    assert "TaskPlugin=task/cgroup" in report.remedy("cgroups")
    assert "the kernel enforces" in report.says("memory limit", requeue)
    assert "SlurmctldParameters=preempt_send_user_signal" in report.remedy(
        "preempt_send_user_signal", requeue
    )
    assert "PreemptMode=REQUEUE with GraceTime=10 s" in report.says("PreemptMode", requeue)
    assert "is cancelled" in report.says("PreemptMode", cancel)


def configured(**values):
    """Words that name a configuration and values over it."""
    return ["configs/demo.toml", *(f"{key.replace('__', '.')}={value}" for key, value in values.items())]


def test_a_fault_of_one_node_is_named_with_the_node(healthy_cluster):
    python = broken(healthy_cluster, "no_user_namespaces")
    report = doctor(healthy_cluster, "--partition", "cpu", "--python", python)
    assert report.not_well() == {"node-local /tmp", "user namespaces"}
    assert report.verdict("user namespaces", CPU) == "fault"
    assert report.says("user namespaces", CPU).startswith("c2: unshare fails: No space left on device")
    assert report.remedy("user namespaces", CPU)


def test_an_image_that_cannot_be_run(cluster):
    images = cluster.shared / "images"
    images.mkdir(exist_ok=True)
    (images / "broken.sif").write_text("no image")
    config = configured(sandbox=f'{{type="apptainer", images="{images}"}}')
    report = doctor(cluster, "--partition", "cpu", *config)
    assert "broken.sif cannot be run here" in report.says("sandbox", CPU)
    assert "/dev/fuse" in report.remedy("sandbox", CPU)


def test_a_folder_that_each_node_has_for_itself_is_not_shared(cluster):
    report = doctor(cluster, "--partition", "cpu", "--shared", "/tmp")
    assert report.says("shared folder", CPU).startswith("c1: No such file or directory: /tmp/.doctor-")
    assert report.says("shared folder", CPU).endswith("(and 1 more of 2 nodes)")
    assert "--shared" in report.remedy("shared folder", CPU)
    assert report.code == 1


def test_a_folder_that_cannot_be_written_is_told_before_any_node_is(cluster):
    report = doctor(cluster, "--partition", "cpu", "--shared", "/etc")
    assert "Permission denied" in report.says("shared folder", "this machine")


def test_a_python_that_jobs_cannot_read(cluster):
    hidden = cluster.state / "hidden"
    hidden.mkdir(mode=0o700, exist_ok=True)
    (hidden / "python").unlink(missing_ok=True)
    (hidden / "python").symlink_to(sys.executable)
    report = doctor(cluster, "--partition", "cpu", "--python", hidden / "python")
    assert (
        report.says("python", CPU)
        == f"0 of 2 nodes answered: a job cannot run {hidden}/python: Permission denied"
    )
    assert "o+rx" in report.remedy("python", CPU)


def test_ports_that_are_closed_between_nodes(healthy_cluster):
    address = healthy_cluster.run("getent", "hosts", "c2").stdout.split()[0]
    healthy_cluster.run("ip", "route", "add", "prohibit", address, user="root", node="c1")
    try:
        report = doctor(healthy_cluster, "--partition", "cpu")
    finally:
        healthy_cluster.run("ip", "route", "del", "prohibit", address, user="root", node="c1")
    assert report.verdict("ports", CPU) == "fault"
    assert "(to c2)" in report.says("ports", CPU)


def test_gpus_where_there_are_none_and_where_no_driver_is_behind_them(cluster):
    report = doctor(cluster, "--partition", "cpu", "--partition", "gpu", "--gpus", "2")
    assert report.says("GRES", CPU) == "2 GPUs per node are needed; its nodes have 0, GresTypes=gpu"
    assert report.remedy("GRES", CPU) == "use partition gpu or preemptible or preemptcancel"
    assert report.verdict("GRES", "partition gpu") == "ok"
    assert "2 in CUDA_VISIBLE_DEVICES, but 0 /dev/nvidia* can be opened" in report.says(
        "GPUs", "partition gpu"
    )


def test_a_node_that_does_not_answer(healthy_cluster):
    slow = ("--timeout", "45", "--python", broken(healthy_cluster, "hangs"))
    report = doctor(healthy_cluster, "--partition", "cpu", *slow)
    assert report.verdict("nodes", CPU) == "fault"
    assert report.says("nodes", CPU).startswith("1 of 2 nodes answered in 45 s")
    assert "node 0 saw no hello-1" in report.says("rename latency", CPU)
    healthy_cluster.wait_for("its job to be gone", lambda: not healthy_cluster.jobs())


def test_a_partition_without_free_nodes_is_told_as_unchecked(healthy_cluster):
    with healthy_cluster.popen("srun", "-N4", "-p", "cpu", "--exclusive", "sleep", "3000") as held:
        healthy_cluster.wait_for("a start", lambda: [j.state for j in healthy_cluster.jobs()] == ["RUNNING"])
        report = doctor(healthy_cluster, "--partition", "cpu", "--timeout", "15")
        held.kill()
    assert report.verdict("nodes", CPU) == "warning"
    assert report.says("nodes", CPU) == "2 nodes were not free within 15 s: they are not checked"
    assert report.code == 0
    assert [job.name for job in healthy_cluster.jobs() if "doctor" in job.name] == []


def test_a_controller_that_is_down_leaves_this_machine_alone(healthy_cluster):
    healthy_cluster.daemon_kill("slurmctld")
    report = doctor(healthy_cluster)
    assert "Unable to contact slurm controller" in report.says("Slurm", "this machine")
    assert ("hard link", "this machine") in report.found
