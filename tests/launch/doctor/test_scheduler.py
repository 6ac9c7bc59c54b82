"""The doctor's verdicts on settings of Slurm: a good value and a bad one, in a real cluster's words."""

import pytest

from hpc_swe.launch.doctor import examine, scheduler
from hpc_swe.launch.doctor.findings import JobNeeds, PartitionNeeds

CONFIG = """\
Configuration data as of 2026-11-20T16:19:35
AccountingStorageType   = accounting_storage/slurmdbd
GresTypes               = gpu
JobRequeue              = 1
MaxArraySize            = 2001
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
PowerPlugin             = \n\
SlurmctldHost[0]        = vm(10.77.0.1)
SlurmctldParameters     = idle_on_node_suspend,preempt_send_user_signal
SLURM_VERSION           = 22.05.8
TaskPlugin              = task/affinity,task/cgroup
TopologyParam           = (null)

Cgroup Support Configuration:
ConstrainDevices        = yes
ConstrainRAMSpace       = yes
"""
PARTITIONS = """\
PartitionName=cpu AllowQos=ALL Default=YES GraceTime=0 Nodes=c[1-2] PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=gpu AllowQos=ALL Default=NO GraceTime=0 Nodes=g1 PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=requeued Default=NO GraceTime=120 PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=hasty Default=NO GraceTime=10 PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=cancelled Default=NO GraceTime=120 PriorityTier=1 PreemptMode=CANCEL State=UP
PartitionName=suspended Default=NO GraceTime=0 PriorityTier=1 PreemptMode=GANG,SUSPEND State=UP
PartitionName=first Default=NO GraceTime=0 PriorityTier=10 PreemptMode=REQUEUE State=UP
PartitionName=closed Default=NO GraceTime=0 PriorityTier=10 PreemptMode=OFF State=DRAIN
"""
NODES = """\
NodeName=c1 Arch=x86_64 CPUTot=8  Gres=(null) OS=Linux 6.18.44 #1 SMP @0 State=IDLE Partitions=cpu,requeued
NodeName=c2 Arch=x86_64 CPUTot=8  Gres=(null) OS=Linux 6.18.44 #1 SMP @0 State=DOWN* Partitions=cpu,requeued
NodeName=g1 Gres=gpu:h100:4(S:0-1),shard:8 State=MIXED Partitions=gpu,hasty,cancelled,suspended,first
"""


def cluster(*changes, partitions=PARTITIONS, members=NODES):
    """The good one, with lines replaced by what they begin with."""
    lines = CONFIG.splitlines()
    for change in changes:
        key = change.split("=")[0].strip()
        lines = [line for line in lines if line.split("=")[0].strip() != key] + [change]
    return scheduler.parse("\n".join(lines), partitions, members)


GOOD = cluster()


@pytest.mark.parametrize(
    ("check", "changed", "verdict"),
    [
        (scheduler.version, "SLURM_VERSION = 20.11.9", "warning"),
        (scheduler.version, "SLURM_VERSION = 24.11.0-rc1", "ok"),
        (scheduler.accounting, "AccountingStorageType = accounting_storage/none", "warning"),
        (scheduler.accounting, "AccountingStorageType = (null)", "warning"),
        (scheduler.requeue, "JobRequeue              = 0", "warning"),
        (scheduler.constraints, "TaskPlugin              = task/none", "fault"),
        (scheduler.constraints, "ConstrainRAMSpace       = no", "fault"),
    ],
)
def test_a_setting_is_judged(check, changed, verdict):
    assert check(GOOD).verdict == "ok"
    assert check(cluster(changed)).verdict == verdict


@pytest.mark.parametrize(
    ("size", "jobs", "verdict"),
    [(2001, 64, "ok"), (4, 4, "ok"), (4, 5, "fault"), (4, 0, "warning"), (0, 1, "fault")],
)
def test_the_largest_role_must_fit_into_an_array(size, jobs, verdict):
    finding = scheduler.arrays(cluster(f"MaxArraySize = {size}"), jobs)
    assert finding.verdict == verdict
    assert f"{size}" in finding.says


@pytest.mark.parametrize(
    ("partition", "verdict", "says"),
    [
        ("cpu", "ok", "never"),
        ("first", "ok", "never"),
        ("requeued", "ok", "GraceTime=120"),
        ("hasty", "warning", "a checkpoint may take 30 s"),
        ("cancelled", "warning", "is cancelled"),
        ("suspended", "warning", "keeps its memory"),
    ],
)
def test_how_a_partition_is_preempted_is_judged(partition, verdict, says):
    finding = scheduler.preemption(GOOD, GOOD.partitions[partition])
    assert finding.verdict == verdict
    assert says in finding.says


def test_preemption_is_off_where_the_cluster_says_so_and_on_by_a_qos():
    off = cluster("PreemptType = preempt/none")
    assert scheduler.preemption(off, off.partitions["hasty"]).verdict == "ok"
    by_qos = cluster("PreemptType = preempt/qos")
    assert scheduler.preemption(by_qos, by_qos.partitions["first"]).verdict == "warning"


def test_a_notice_is_missed_only_where_jobs_are_preempted():
    bad = cluster("SlurmctldParameters     = (null)")
    assert scheduler.preemption_signal(GOOD, GOOD.partitions["hasty"]).verdict == "ok"
    assert scheduler.preemption_signal(bad, bad.partitions["cpu"]).verdict == "ok"
    assert scheduler.preemption_signal(bad, bad.partitions["hasty"]).remedy.startswith(
        "SlurmctldParameters=preempt_send"
    )


@pytest.mark.parametrize(("name", "verdict"), [("cpu", "ok"), ("closed", "fault"), ("cpus", "fault")])
def test_a_partition_must_be_there_and_up(name, verdict):
    assert scheduler.partition(GOOD, PartitionNeeds(name)).verdict == verdict


def test_a_node_that_is_powered_down_until_a_job_needs_it_is_usable():
    asleep = cluster(members=NODES.replace("IDLE", "IDLE+CLOUD+POWERED_DOWN"))
    assert scheduler.partition(asleep, PartitionNeeds("cpu")).verdict == "ok"


def test_a_job_of_more_nodes_than_a_partition_has_is_a_fault():
    found = scheduler.partition(GOOD, PartitionNeeds("cpu", job_nodes=2))
    assert found.verdict == "fault"
    assert found.says.startswith("a job needs 2 nodes at once, and 1 are usable")


def test_nodes_that_are_down_are_not_counted():
    assert GOOD.partitions["cpu"].nodes == 1
    assert (
        scheduler.partition(
            cluster(members=NODES.replace("IDLE", "IDLE+DRAIN")), PartitionNeeds("cpu")
        ).verdict
        == "fault"
    )


@pytest.mark.parametrize(
    ("minutes", "cores", "memory_gb", "keys"),
    [(1440, 8, 62, []), (1441, 8, 62, ["timeout_min"]), (60, 9, 63, ["cpus_per_task", "mem_gb"])],
)
def test_a_job_that_no_node_of_its_partition_can_take_is_a_fault(minutes, cores, memory_gb, keys):
    partitions = PARTITIONS.replace("PartitionName=cpu", "PartitionName=cpu MaxTime=1-00:00:00")
    limited = cluster(partitions=partitions, members=NODES.replace("CPUTot=8", "CPUTot=8 RealMemory=64000"))
    need = PartitionNeeds("cpu", jobs=(JobNeeds("rollout", minutes, cores, memory_gb),))
    found = [each for each in scheduler.limits(limited.partitions["cpu"], need) if each.verdict != "ok"]
    assert [each.says.split()[0].rpartition(".")[2] for each in found] == keys
    unknown = scheduler.limits(GOOD.partitions["first"], need)
    assert [each.verdict for each in unknown] == ["ok"], "what this Slurm does not tell limits nothing"


@pytest.mark.parametrize(
    ("partition", "gpus", "verdict"), [("gpu", 4, "ok"), ("gpu", 5, "fault"), ("cpu", 1, "fault")]
)
def test_gpus_are_asked_for_where_there_are_some(partition, gpus, verdict):
    finding = scheduler.gres(GOOD, PartitionNeeds(partition, gpus=gpus))
    assert finding.verdict == verdict
    assert (gpus == 1) == ("use partition gpu" in finding.remedy)


def test_the_default_partition_is_named_and_never_more_nodes_than_it_has():
    (ask,) = examine.resolve(GOOD, [PartitionNeeds("")], 2)
    assert (ask.partition, ask.nodes) == ("cpu", 1)
