"""What probes measure, what the doctor makes of it, and what a person at the shell sees."""

import dataclasses
import json
import os
import signal
import socket
import threading

import msgspec
import pytest

from hpc_swe.cluster import cgroups
from hpc_swe.cluster.processes import start_time
from hpc_swe.config import config as configuration
from hpc_swe.launch.doctor import examine, meeting, nodes, probe, srun
from hpc_swe.launch.doctor.findings import ComputingNeeds, PartitionNeeds
from hpc_swe.launch.doctor.meeting import Peer
from hpc_swe.launch.doctor.probe import Shared
from hpc_swe.launch.doctor.srun import ProbeSetup, SrunResult
from hpc_swe.models.builds import Builds
from tests.kit.checkout import ROOT, typed

# What the probe of a node of the test cluster printed, but for the path of its python.
PRINTED = (
    'hpc_swe-probe 0 {"rank":0,"host":"c1","python":"3.11.2 at .venv/bin/python",'
    '"user_namespaces":"","apptainer":"apptainer version 1.4.5","container":"","tmp":"/tmp",'
    '"tmp_kind":"tmpfs","tmp_free_gb":2.147483648,"memory_mb":1024.0,"gpus":0,"gpu_files":0,'
    '"gpu_model":"","flash_attention":false,"tensorboard":true,"shared":{"kind":"ext4","error":"","crossing":"",'
    '"rename_ms":0.008238000191340689},"peers":[{"host":"c2","unseen":"","port":"",'
    '"visible_ms":1.1675229998218128}]}'
)
# The same with a larger /tmp and two real GPUs, which the test cluster has not.
(CPU_NODE,) = probe.read(PRINTED)
MEASURED = msgspec.structs.replace(CPU_NODE, tmp_kind="ext4", tmp_free_gb=73.0, gpus=2, gpu_files=2)
ASK = PartitionNeeds("gpu", gpus=2)


def changed(**fields):
    """The measured record with other values, those of the shared folder and the peer by their names."""
    shared = {key: fields.pop(key) for key in list(fields) if key in Shared.__struct_fields__}
    peer = {key: fields.pop(key) for key in list(fields) if key in Peer.__struct_fields__}
    fields["shared"] = msgspec.structs.replace(MEASURED.shared, **shared)
    fields["peers"] = [msgspec.structs.replace(MEASURED.peers[0], **peer)]
    return msgspec.structs.replace(MEASURED, **fields)


def not_well(*probes, images="images"):
    return {f.check: f for f in nodes.findings(ASK, probes, images) if f.verdict != "ok"}


def test_what_a_good_node_measures_is_well():
    assert not_well(MEASURED) == {}
    assert not_well(changed(gpu_model="NVIDIA A100-SXM4-80GB")) == {}
    assert not_well(changed(gpu_model="NVIDIA H200", flash_attention=True)) == {}


@pytest.mark.parametrize(
    ("check", "verdict", "fields"),
    [
        ("user namespaces", "fault", {"user_namespaces": "No space left on device"}),
        ("Apptainer", "fault", {"apptainer": ""}),
        ("sandbox", "fault", {"container": "[sandbox] x.sif cannot be run here"}),
        ("node-local /tmp", "warning", {"tmp_free_gb": 2.1, "tmp_kind": "tmpfs"}),
        ("node-local /tmp", "fault", {"tmp_free_gb": 0.2}),
        ("memory limit", "fault", {"memory_mb": 0.0}),
        ("memory limit", "fault", {"memory_mb": 8000.0}),
        ("GPUs", "fault", {"gpus": 0}),
        ("GPUs", "warning", {"gpu_files": 0}),
        ("GPUs", "warning", {"gpu_files": 8}),
        ("flash-attn-4", "warning", {"gpu_model": "NVIDIA H100 80GB HBM3"}),
        ("flash-attn-4", "warning", {"gpu_model": "NVIDIA GH200 480GB"}),
        ("TensorBoard", "fault", {"tensorboard": False}),
        ("rename between folders", "fault", {"crossing": "Invalid cross-device link"}),
        ("hard link", "fault", {"linking": "Operation not permitted"}),
        ("rename", "warning", {"rename_ms": 80.0}),
        ("rename latency", "warning", {"visible_ms": 2500.0}),
        ("rename latency", "fault", {"visible_ms": 31000.0}),
        ("ports", "fault", {"port": "No route to host"}),
    ],
)
def test_a_measured_fault_is_found_with_a_remedy_and_nothing_else_is(check, verdict, fields):
    found = not_well(changed(**fields))
    assert set(found) == {check}
    assert found[check].verdict == verdict
    assert found[check].remedy
    assert found[check].where == "partition gpu"


def test_a_sandbox_without_an_image_is_told_how_to_make_one_alone():
    found = not_well(changed(container="[sandbox] images: no .sif file in images: run it"))["sandbox"]
    assert "make image" in found.remedy
    assert "namespaces" not in found.remedy


@pytest.mark.parametrize(
    ("model", "has_experts", "verdict"),
    [
        ("NVIDIA A100-SXM4-80GB", False, "ok"),
        ("NVIDIA A100-SXM4-80GB", True, "warning"),
        ("NVIDIA H100 80GB HBM3", True, "ok"),
        ("NVIDIA B200", True, "warning"),
        ("Tesla V100-SXM2-32GB", False, "fault"),
        ("NVIDIA RTX 6000 Ada Generation", False, "ok"),
    ],
)
def test_a_gpu_without_a_kernel_that_is_needed_is_found(model, has_experts, verdict):
    computing = tuple(ComputingNeeds(what, None, 0.0, has_experts) for what in ("learner", "engine"))
    need = dataclasses.replace(ASK, computing=computing)
    probes = [changed(gpu_model="NVIDIA H200"), changed(gpu_model=model)]
    found = [each.verdict for each in nodes.findings(need, probes, "") if each.check == "GPU kernels"]
    assert sorted(found) == sorted([verdict, "ok"])


@pytest.mark.parametrize(
    ("glibc", "processor", "verdict"),
    [("2.28", "x86_64", "fault"), ("2.31", "x86_64", "ok"), ("2.31", "aarch64", "fault"), ("", "", "ok")],
)
def test_a_system_for_which_no_wheel_is_built_is_a_fault(glibc, processor, verdict):
    need = dataclasses.replace(ASK, computing=(ComputingNeeds("learner", None),))
    (found,) = [
        each
        for each in nodes.findings(need, [changed(glibc=glibc, processor=processor)], "")
        if each.check == "glibc"
    ]
    assert found.verdict == verdict


def test_a_folder_that_is_not_seen_is_one_fault_and_not_many():
    unseen = msgspec.structs.replace(
        MEASURED, shared=Shared(error="No such file or directory: /tmp/runs/token"), peers=[]
    )
    assert set(not_well(unseen)) == {"shared folder"}


def test_a_peer_that_is_not_seen_is_told():
    found = not_well(changed(unseen="node 0 saw no hello-1-* in 60 s", visible_ms=0.0))
    assert found["rename latency"].verdict == "fault"


def test_findings_name_the_first_bad_node_and_count_the_others():
    second = msgspec.structs.replace(MEASURED, rank=1, host="c2", apptainer="")
    assert not_well(MEASURED, second)["Apptainer"].says.startswith("c2: apptainer is not on")
    assert "1 more of 2" in not_well(changed(apptainer=""), second)["Apptainer"].says


@pytest.mark.parametrize(
    ("errors", "timed_out", "check", "verdict", "says"),
    [
        (
            "slurmstepd: error: execve(): /opt/python: Permission denied",
            False,
            "python",
            "fault",
            "/opt/python: Perm",
        ),
        ("/usr/bin/python3: No module named hpc_swe", False, "python", "fault", "No module named hpc_swe"),
        (
            "srun: error: Unable to allocate resources: Invalid account",
            False,
            "srun",
            "fault",
            "Invalid account",
        ),
        ("srun: job 7 queued and waiting for resources", True, "nodes", "warning", "not checked"),
        ("srun: error: Task launch for StepId=7.0 failed on node c2", False, "nodes", "fault", "node c2"),
        ("", True, "nodes", "fault", "0 of 2 nodes answered in 9 s: srun printed nothing"),
    ],
)
def test_why_nodes_do_not_answer_is_read_from_what_srun_says(
    errors, timed_out, check, verdict, says, tmp_path
):
    bench = ProbeSetup(tmp_path, "token", "python", "", 9.0)
    finding = srun.missing_answers(PartitionNeeds("cpu"), bench, SrunResult("", errors, timed_out), 0)
    assert (finding.check, finding.verdict) == (check, verdict)
    assert says in finding.says


def test_records_of_nodes_survive_being_mixed_and_a_torn_one_is_left_out():
    first, second = (
        probe.lines(MEASURED),
        probe.lines(msgspec.structs.replace(MEASURED, rank=1, tmp="/x" * 999)),
    )
    mixed = [line for pair in zip(second, [*first, *["noise"] * 99], strict=False) for line in pair]
    assert max(map(len, mixed)) < 1024
    assert [found.rank for found in probe.read("\n".join(mixed))] == [0, 1]
    assert [found.rank for found in probe.read("\n".join([*first, second[0]]))] == [0]


def test_two_nodes_meet_and_measure_each_other(tmp_path):
    found = {}

    def attend(rank):
        found[rank] = meeting.attend(tmp_path, rank, 2, wait_s=180.0)

    threads = [threading.Thread(target=attend, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    (seen,) = found[0]
    assert (seen.host, seen.unseen, seen.port) == (socket.gethostname(), "", "")
    assert 0 < seen.visible_ms < 60_000


def test_a_node_that_never_comes_is_given_up_at_the_deadline(tmp_path):
    (peer,) = meeting.attend(tmp_path, 0, 2, wait_s=0.2)
    assert peer.unseen.startswith("node 0 saw no hello-1-* in 0 s")


CGROUP_1 = "9:name=systemd:/\n4:cpuacct,memory:/vc/c1/slurm_c1/job_1/step_0\n0::/\n"
MOUNTS_1 = """\
76 72 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
125 76 0:32 /vc/c1 /sys/fs/cgroup/memory rw,relatime shared:7 - cgroup cgroup rw,cpuacct,memory
126 76 0:33 /vc/c1 /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
127 76 0:34 / / rw,relatime - ext4 /dev/vda rw
128 76 0:35 / /tmp rw,relatime - tmpfs none rw
"""
CGROUP_2 = "0::/system.slice/slurmstepd.scope/job_1/step_0/user/task_0\n"
MOUNTS_2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def test_memory_limits_are_read_from_the_own_group_up_to_the_mount():
    first = list(map(str, cgroups.limit_files(CGROUP_1, MOUNTS_1)))
    assert "/sys/fs/cgroup/memory/slurm_c1/job_1/step_0/memory.limit_in_bytes" in first
    assert "/sys/fs/cgroup/memory/slurm_c1/job_1/memory.limit_in_bytes" in first
    assert not any("/cpu/" in path for path in first)
    second = list(map(str, cgroups.limit_files(CGROUP_2, MOUNTS_2)))
    scope = "/sys/fs/cgroup/system.slice/slurmstepd.scope"
    assert second[0] == f"{scope}/job_1/step_0/user/task_0/memory.max"
    assert f"{scope}/job_1/memory.max" in second


GROUPS = {
    "memory.max": {"memory.max": "1000", "memory.current": "700"},
    "memory.limit_in_bytes": {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "700"},
}


@pytest.mark.parametrize(
    ("limit", "changes", "left"),
    [
        ("memory.max", {}, 450),
        ("memory.max", {"memory.max": "max"}, cgroups.NO_LIMIT),
        ("memory.max", {"memory.current": "1300"}, 0),
        ("memory.limit_in_bytes", {}, 450),
        ("memory.limit_in_bytes", {"memory.limit_in_bytes": str(2**63 - 4096)}, cgroups.NO_LIMIT),
    ],
)
def test_a_group_has_left_what_its_processes_do_not_use(tmp_path, limit, changes, left):
    """Copies of files on disk are not used; in v1 a group's own are told beside those of the groups below."""
    prefix, others = ("", "") if limit == "memory.max" else ("total_", "active_file 1\n")
    stat = f"{others}{prefix}active_file 100\n{prefix}inactive_file 50\nanon 550\n"
    for name, text in {**GROUPS[limit], "memory.stat": stat, **changes}.items():
        (tmp_path / name).write_text(text)
    assert cgroups.memory_left([tmp_path / limit]) == left


def test_the_file_system_of_a_path_is_that_of_the_nearest_mount():
    assert probe.kind_of("/tmp/x", MOUNTS_1) == "tmpfs"
    assert probe.kind_of("/tmpx", MOUNTS_1) == "ext4"


def test_a_configuration_s_partitions_and_gpus_are_asked_for():
    roles = {
        "learner": {"partition": "gpu", "nodes": 2, "gpus_per_node": 8, "options": {"qos": "long"}},
        "inference": {"partition": "gpu", "gpus_per_node": 16, "options": {"gres": "gpu:h100:2"}},
        "rollout": {"partition": "", "gpus_per_node": 0},
    }
    asks = {
        ask.partition: ask for ask in examine.wanted({"account": "lab", "partition": "cpu", "roles": roles})
    }
    assert {name: (ask.gpus, ask.job_nodes) for name, ask in asks.items()} == {"gpu": (8, 2), "cpu": (0, 1)}
    assert asks["cpu"].options == ("--account=lab",)
    assert examine.wanted({}) == [PartitionNeeds("")]


def test_builds_and_gpus_of_nodes_are_compared_with_the_configuration():
    words = [
        'executor={type="slurm", roles={learner={partition="gpu"}}}',
        "engine.device=gpu",
        "policy.device=gpu",
    ]
    config = configuration.read(ROOT / "configs/demo.toml", overrides=[*words, 'sandbox={type="process"}'])
    needs = examine.wanted(configuration.dump(config)["executor"], examine.computing(config))
    sized = examine.wanted(configuration.dump(config)["executor"], {}, examine.job_needs(config))
    of = {need.partition: {job.role: job.minutes for job in need.jobs} for need in sized}
    assert of["gpu"] == {"learner": 1440}
    assert {"inference", "rollout", "reward", "coordinator"} == of[""].keys()
    on = {need.partition: [each.what for each in need.computing] for need in needs}
    assert on == {"": ["engine"], "gpu": ["learner"]}
    learner = ComputingNeeds("learner", config.policy, 80.0)
    need = dataclasses.replace(ASK, computing=(learner,))
    cpu = msgspec.structs.replace(MEASURED, gpu_gib=79.6, builds=Builds(torch="2+cpu", vllm="1+cpu"))
    found = {f.check: f for f in nodes.findings(need, [cpu], "")}
    assert found["build of the learner"].verdict == "fault"
    assert (
        "c1: policy.device = 'gpu', but torch 2+cpu is a build for CPUs" in found["build of the learner"].says
    )
    assert found["GPU memory"].says == "the learner needs 80.0 GiB of each GPU, which has 79.6 GiB"
    old = Builds(torch="2", torch_cuda="13.0", vllm="1", driver_cuda="12.4")
    found = {
        f.check: f for f in nodes.findings(need, [msgspec.structs.replace(cpu, builds=old, gpu_gib=141)], "")
    }
    assert "the driver supports CUDA 12.4" in found["build of the learner"].says
    assert found["GPU memory"].says.startswith("141.0 GiB each; a start compares gpu_gib")


def run(tmp_path, *words):
    (tmp_path / "runs").mkdir(parents=True, exist_ok=True)
    return typed("hpc_swe.doctor", "--shared", tmp_path / "runs", *words, PATH="/var/empty")


def test_without_slurm_this_machine_alone_is_checked_and_nothing_is_left(tmp_path):
    done = run(tmp_path, "--json", "configs/demo.toml", "configs/slurm.toml", 'sandbox={type="process"}')
    found = {each["check"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 1
    assert found["Slurm"]["says"] == "srun is not on PATH"
    assert found["Apptainer"]["verdict"] == "fault"
    assert found["GPU"]["says"] == "not checked: nvidia-smi finds none on this machine"
    assert {"hard link", "TensorBoard", "node-local /tmp"} <= set(found)
    assert "ports" not in found
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_shared_folder_that_does_not_exist_is_named_and_not_made(tmp_path):
    done = run(tmp_path, f"--shared={tmp_path}/typo/x")
    assert done.returncode == 2
    assert f"--shared = {tmp_path}/typo/x: no such folder" in done.stderr
    assert not (tmp_path / "typo").exists()


def test_a_process_that_holds_sruns_output_does_not_hold_the_doctor(tmp_path, monkeypatch):
    holder = f"setsid sh -c 'echo $$ > {tmp_path}/holder; exec sleep 300' &"
    wait = f"until [ -s {tmp_path}/holder ]; do sleep 0.05; done; echo answer; sleep 300"
    for name, lines in (("srun", f"{holder}\n{wait}"), ("scancel", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    setup = ProbeSetup(tmp_path, "token", "python", "", timeout_s=3.0, answer_s=1.0)
    result = srun.srun(PartitionNeeds("cpu"), setup)
    holder = int((tmp_path / "holder").read_text())
    assert start_time(holder), "it was not awaited"
    os.kill(holder, signal.SIGKILL)
    assert result == SrunResult("answer\n", "", timed_out=True)
