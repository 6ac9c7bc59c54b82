"""The real cron keeps runs going, by the crontab that ships."""

import os

import pytest

from hpc_swe.base.records import RunManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from tests.kit.checkout import ROOT
from tests.kit.cluster.bench import Bench

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture
def kept(bench):
    """A healthy run, one whose jobs were cancelled, and one that has finished."""
    runs = [bench(2), bench(2), bench(1)]
    for run in runs:
        run.start()
    whole, lost, finished = runs
    (finished.run / "control/FINISHED").touch()
    os.chown(finished.run / "control/FINISHED", 2001, 2001)
    cluster, lost_id = whole.cluster, atomic.get(RunDir(lost.run).manifest, RunManifest).run_id
    cluster.wait_for("live workers", lambda: [len(live(run)) for run in runs] == [2, 2, 0])
    cluster.run("scancel", f"--name=reward:{lost_id}")
    cluster.wait_for("their end", lambda: not [job for job in cluster.jobs() if job.name.endswith(lost_id)])
    return runs


def start_cron(runs: list[Bench]) -> None:
    """Returns when it has waked and ticked each of the runs."""
    cluster, folders = runs[0].cluster, [run.run.parent for run in runs]
    shipped = (ROOT / "sbatch/crontab.example").read_text().splitlines()
    settings = [line for line in shipped if "=" in line and not line.startswith(("#", "*"))]
    lines = [f"* * * * * {ROOT}/sbatch/tick.sh {folder}/run; touch {folder}/ticked" for folder in folders]
    table = cluster.shared / "crontab"
    table.write_text("\n".join([*settings, *lines, ""]))
    cluster.run("crontab", str(table))
    cluster.daemon_start("cron")
    cluster.wait_for("cron's first ticks", lambda: all((folder / "ticked").exists() for folder in folders))


def live(run: Bench) -> set[str]:
    """Owners that hold a lease."""
    return {path.stem for path in (run.run / "nodes").glob("reward-*.json")}


def test_cron_resubmits_cancelled_runs_and_leaves_all_others_alone(kept):
    whole, lost, finished = kept
    before = live(whole), live(lost)
    start_cron(kept)
    assert [submissions(run) for run in kept] == [1, 2, 1]
    assert "submitted 2 reward" in (lost.run / "logs/tick.log").read_text()
    lost.cluster.wait_for("workers of the new submission", lambda: len(live(lost) - before[1]) >= 2)
    assert live(whole) == before[0], "a healthy run is left alone"
    assert live(finished) == set()


def submissions(run: Bench) -> int:
    return sum(name.isdecimal() for name in os.listdir(run.run / "launch/reward"))
