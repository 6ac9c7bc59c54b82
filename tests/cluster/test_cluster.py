"""The test cluster itself: it behaves as a cluster does, breaks as one does, and leaves no trace."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.kit.checkout import ROOT, environment
from tests.kit.cluster.cluster import Cluster
from tests.kit.cluster.configuration import ORDINARY
from tests.kit.cluster.hosts import PATIENCE_S, arguments, wait_for
from tests.kit.cluster.machine import living, sweep

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
HOST_FILES = ["/etc/passwd", "/etc/group", "/etc/shadow", "/etc/hosts", "/etc/crontab"]
HOST_FOLDERS = ["/etc/slurm", "/etc/cron.d", "/var/spool/cron/crontabs", "/run", "/sys/class/net"]


def submit(cluster: Cluster, *words: str, script: str) -> str:
    return cluster.run("sbatch", "--parsable", *words, f"--wrap={script}").stdout.strip()


def wait_until_it_runs(cluster: Cluster, job: str) -> None:
    wait_for(f"job {job} to run", lambda: (job, "RUNNING") in [(j.id, j.state) for j in cluster.jobs()])


def users_processes(cluster: Cluster, node: str | None = None) -> list[str]:
    return [" ".join(p.arguments) for p in cluster.processes(node) if p.uid in ORDINARY]


def machine() -> dict[str, object]:
    """What a cluster might have changed, and other tests, and other clusters, do not."""
    files = {name: Path(name).read_text() for name in HOST_FILES}
    return {**files, **{name: sorted(os.listdir(name)) for name in HOST_FOLDERS}}


def traces(state: Path) -> list[str]:
    named = [*Path("/sys/fs/cgroup").rglob(f"*{state.name}*"), *state.parent.glob(state.name)]
    running = [
        a
        for pid in os.listdir("/proc")
        if pid.isdigit() and str(state) in (a := " ".join(arguments(int(pid))))
    ]
    mounted = [line for line in Path("/proc/mounts").read_text().splitlines() if state.name in line]
    return [*map(str, named), *running, *mounted]


@pytest.mark.parametrize("partition", ["cpu", "short", "gpu", "preemptible", "preemptcancel"])
def test_a_job_runs_as_its_user_on_a_host_of_its_own(healthy_cluster, partition):
    script = (
        "echo $SLURM_JOB_PARTITION $USER $(hostname) $SLURMD_NODENAME; ls /tmp; touch /tmp/of_$(hostname)"
    )
    said = healthy_cluster.run("srun", f"--partition={partition}", "bash", "-c", script).stdout.split()
    assert said[:2] == [partition, "alice"]
    assert said[2] == said[3]
    seen = {f"of_{said[2]}", *ROOT.relative_to("/").parts[1:2]}  # a checkout below /tmp is shown
    assert set(said[4:]) <= seen


def test_a_job_sees_only_the_gpus_that_it_was_given(healthy_cluster):
    if not healthy_cluster.layout.controllers:
        pytest.skip("this machine has no cgroup v1, by which Slurm keeps devices apart")
    script = f"for i in 0 1 2 3; do : <{healthy_cluster.state}/dev/gpu$i; done; echo $CUDA_VISIBLE_DEVICES"
    ran = healthy_cluster.run("srun", "--partition=gpu", "--gres=gpu:1", "bash", "-c", script)
    assert ran.stdout.strip() == "0"
    refusals = [line.rpartition(": ")[2] for line in ran.stderr.splitlines() if "/dev/gpu" in line]
    assert refusals == ["No such device or address"] + 3 * ["Operation not permitted"]


def test_two_clusters_do_not_disturb_each_other_and_leave_no_trace(healthy_cluster):
    before, settings = machine(), {"MaxArraySize": "4", "JobRequeue": "0"}
    job = submit(healthy_cluster, script="sleep 3000")
    wait_until_it_runs(healthy_cluster, job)
    with Cluster.start(nodes=("c1", "g1"), settings=settings) as second:
        assert second.jobs() == []
        wait_until_it_runs(second, submit(second, "--nodelist=c1", script="sleep 3000"))
        assert second.run("sbatch", "--array=0-7", "--wrap=true", check=False).returncode
        wait_for_cron(second)
        second.node_poweroff("c1")
        assert users_processes(healthy_cluster, "c1")
        assert len(traces(second.state)) > 3
    assert traces(second.state) == []
    assert machine() == before
    assert [j.state for j in healthy_cluster.jobs()] == ["RUNNING"]


def wait_for_cron(cluster: Cluster) -> None:
    """The real one, with a user's own table."""
    made = cluster.shared / "by_cron"
    with (cluster.state / "table").open("w+") as table:
        table.write(f"@reboot sinfo > {made}\n")
        table.seek(0)
        cluster.run("crontab", "-", stdin=table)
    cluster.daemon_start("cron")
    wait_for("cron's job", lambda: made.exists() and "preemptible" in made.read_text())


WHERE_JOBS_FIND_THE_CODE = """
import sys
from tests.kit.checkout import ROOT
from tests.kit.cluster.cluster import Cluster
with Cluster.start(nodes=["c1"]) as cluster:
    line = [sys.executable, "-c", "import hpc_swe; print(open('README.md').readline(), hpc_swe.__file__)"]
    print(cluster.run("srun", *line, cwd=ROOT).stdout)
"""


def test_jobs_reach_a_checkout_in_a_home_that_others_cannot_enter(cluster):
    """Made under a umask of 077."""
    with tempfile.TemporaryDirectory(prefix="closed-", dir=Path.home()) as home:
        checkout = Path(home) / "hpc_swe"
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".venv", ".cache", ".git", "runs"))
        subprocess.run(["chmod", "--recursive", "u=rwX,go=", checkout], check=True)
        code = [sys.executable, "-c", WHERE_JOBS_FIND_THE_CODE]
        env = {**os.environ, "PYTHONPATH": str(checkout)}
        done = subprocess.run(code, cwd=checkout, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.stdout.split() == ["#", "hpc_swe", f"{checkout}/hpc_swe/__init__.py"], done.stderr
        assert Path(home).stat().st_mode & 0o777 == 0o700, "it stays closed to all others"


START_AND_SLEEP = """
import time
from tests.kit.cluster.cluster import Cluster
print(Cluster.start(nodes=["c1"]).state, flush=True)
time.sleep(600)
"""


def test_a_cluster_dies_with_who_started_it_and_its_folder_is_swept(cluster):
    command = [sys.executable, "-c", START_AND_SLEEP]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as owner:
        state = Path(owner.stdout.readline().strip())
        login = living(state / "pids" / "login")
        owner.kill()
    assert login is not None
    wait_for("the cluster's end", lambda: not living(state / "pids" / "login"))
    sweep()
    wait_for("the end of its last processes", lambda: traces(state) == [])
