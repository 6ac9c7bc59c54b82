"""The real cron keeps a run going, by the crontab that ships."""

import os

import pytest
from bench import Bench
from cluster import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture
def kept(bench):
    """A healthy run of two workers, one that has finished, and cron over both."""
    runs = [bench(2), bench(1)]
    for run in runs:
        run.start()
    whole, finished = runs
    (finished.run / "control/FINISHED").touch()
    os.chown(finished.run / "control/FINISHED", 2001, 2001)
    cluster = whole.cluster
    cluster.wait_for("live workers", lambda: len(live(whole)) == 2 and not live(finished))
    shipped = (ROOT / "sbatch/crontab.example").read_text().splitlines()
    settings = [line for line in shipped if "=" in line and not line.startswith(("#", "*"))]
    lines = [f"* * * * * {ROOT}/sbatch/tick.sh {run.run}; touch {run.run}.ticked" for run in runs]
    table = cluster.shared / "crontab"
    table.write_text("\n".join([*settings, *lines, ""]))
    cluster.run("crontab", str(table))
    cluster.daemon_start("cron")
    return whole, finished


def live(run: Bench) -> set[str]:
    """Owners that hold a lease."""
    return {path.stem for path in (run.run / "nodes").glob("reward-*.json")}


def test_cron_resubmits_what_was_cancelled_and_leaves_the_healthy_and_the_finished_alone(kept):
    whole, finished = kept
    before = live(whole)
    ticked = [run.run.with_name("run.ticked") for run in kept]
    whole.cluster.wait_for("cron's first ticks", lambda: all(path.exists() for path in ticked))
    assert live(whole) == before, "a healthy run is left alone"
    assert submissions(whole) == submissions(finished) == 1
    whole.cluster.run("scancel", "--me")
    whole.cluster.wait_for("an empty queue", lambda: not whole.jobs())
    whole.cluster.wait_for("workers of a new submission", lambda: submissions(whole) == 2)
    whole.cluster.wait_for("their leases", lambda: len(live(whole) - before) >= 2)
    assert submissions(finished) == 1
    assert live(finished) == set()
    told = whole.run / "logs/tick.log"
    whole.cluster.wait_for("the tick's last words", told.exists)
    assert "submitted 2 reward" in told.read_text()


def submissions(run: Bench) -> int:
    return sum(name.isdecimal() for name in os.listdir(run.run / "launch/reward"))
