"""The screen of a run: that it tells what matters, fits, and stands without coordinator or scheduler."""

import io
import os
import subprocess
import sys
import threading
import time
from itertools import count

import pytest
from rich.console import Console

from hpc_swe.base.errors import SchedulerError
from hpc_swe.base.records import Endpoint, EndpointTable, RoleStatus, StatusReport, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, submissions
from hpc_swe.base.store.submissions import Started, Submitted
from hpc_swe.cluster.executors.base import Job
from hpc_swe.cluster.executors.local import Local
from hpc_swe.config import config as configuration
from hpc_swe.launch import control
from hpc_swe.launch.view import Queue, RunReader, RunView
from hpc_swe.view.status import LINES, _drawn, render
from tests.kit.checkout import ROOT
from tests.kit.constants import NOBODY, empty_model

DESIRED = {"coordinator": 1, "learner": 1, "inference": 4, "rollout": 16, "reward": 4}
VERSION = WeightVersion(incarnation=1, step=12)
OLDER = WeightVersion(incarnation=1, step=11)
CURVES = (
    *("reward/mean", "solve/train", "solve/eval/greedy", "solve/eval/sampled", "groups/signal_rate"),
    *("staleness/mean", "staleness/max", "groups/dropped_old", "rate/sampled_tokens"),
    *("episodes/turns", "episodes/infra_rate"),
    "exit/completed",
)


def report(**changes):
    told = {
        "beat": 7,
        "roles": [
            RoleStatus(role=r, desired=n, alive=n, silent=int(r == "rollout")) for r, n in DESIRED.items()
        ],
        "spools": {
            name: {"ready": 12, "claimed": 30, "dead": 1} for name in ("requests", "episodes", "scored")
        },
        "oldest_s": {"requests": 125.0},
        "waits_for": "results of train-000012-03, train-000012-05, train-000012-06 ..",
        "step": 12,
        "step_s": 60.0,
        "newest": VERSION,
        "recent": {name: [step / 20 for step in range(20)] for name in CURVES},
        "errors": [f"train-00001{n}-00 a0: the sandbox said a great deal of things " * 3 for n in range(20)],
    }
    return StatusReport(**{**told, **changes})


def view(**changes):
    told = {"name": "demo", "steps": 48, "desired": DESIRED, "orders": [], "queue": Queue()}
    told |= {"report": report(), "engines": [engine(VERSION), engine(VERSION), engine(OLDER, VERSION)]}
    return RunView(**{**told, **changes})


def engine(*versions, **more):
    return Endpoint(owner="e", url="http://e", versions=list(versions), updating=len(versions) > 1, **more)


def screen(shown, width=80):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(shown, width))
    return console.file.getvalue()


def rows(text):
    return {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}


# what is shown


def test_engines_are_counted_by_the_weights_they_serve():
    told = "newest weights v000012-i01; engines: 1 at v000011-i01 > v000012-i01, 2 at v000012-i01"
    assert told[:80] in screen(view())
    assert "engines: none serves" in screen(view(engines=[]))
    asleep = screen(view(engines=[engine(VERSION, sleeping=True)]))
    assert f"engines: 1 asleep at {VERSION.name}" in asleep
    assert "engines" not in screen(view(desired={"coordinator": 1, "learner": 1}))


def test_a_run_that_a_sign_has_ended_says_so_first():
    reason = "gap/k3 was above 0.01 in steps 3 to 5: 0.02 0.03 0.1 (stop.gap)"
    lines = screen(view(orders=["FINISHED"], ended=reason)).splitlines()
    assert f"ended early: {reason}" in lines[:3]


def test_report_that_grows_old_is_called_old_unless_the_run_has_finished():
    queue = Queue([Job("coordinator", "7", 1, "running")])
    told = screen(view(silent_s=120.0, queue=queue))
    assert "the coordinator has not reported for 2 min: everything below is old" in told
    assert "is old" not in screen(view(silent_s=30.0, queue=queue))
    assert "is silent" not in screen(view(silent_s=120.0, orders=["FINISHED"]))


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({}, True),
        ({"queue": Queue([Job("coordinator", "7", 1, "waiting", "Priority")])}, True),
        ({"silent_s": 3.0}, False),
        ({"queue": Queue([Job("coordinator", "7", 1, "running")])}, False),
        ({"queue": Queue(silence="timed out")}, False),
        ({"desired": {**DESIRED, "coordinator": 0}}, False),
        ({"orders": ["FINISHED"]}, False),
    ],
)
def test_counts_of_a_run_that_was_stopped_are_not_told_as_those_of_now(changes, is_told):
    text = screen(view(**({"silent_s": 30.0} | changes)))
    assert ("no coordinator is running: everything below is 30 s old" in text) == is_told


def test_brackets_in_errors_are_text_and_no_markup():
    text = screen(view(report=report(errors=["[sandbox] no apptainer [/bold] on PATH"])))
    assert "error: [sandbox] no apptainer [/bold] on PATH" in text


def test_an_engine_that_refuses_weights_says_so_among_other_errors():
    told = report(troubles={"inference-000001": "refused v000013-i01:\n the probe differs"})
    text = screen(view(report=told), width=80)
    assert "error: inference-000001: refused v000013-i01: the probe differs" in text


# how it is shown


@pytest.mark.parametrize("width", [60, 80, 120])
def test_everything_at_once_fits_forty_lines_of_ascii(width):
    queue = Queue(
        [Job("rollout", "7_1", 1, "waiting", "ReqNodeNotAvail, UnavailableNodes:" + "c" * 99)],
        "the scheduler does not answer, so waiting jobs are not known: " + "x" * 200,
        failures=[f"{role}: exit code 1 on c1 after 3 s" for role in DESIRED],
    )
    text = screen(view(queue=queue, orders=["DRAIN", "STOP"], silent_s=100.0), width)
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()
    assert sum(line.startswith("error") for line in text.splitlines()) <= LINES


def test_curves_are_drawn_in_blocks_where_the_terminal_shows_them():
    told = report(recent={"reward/mean": [0.0, 0.5, 1.0]})
    shown = {}
    for encoding in ("utf-8", "ascii"):
        console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding), width=80)
        console.print(_drawn(view(report=told), console))
        console.file.flush()
        shown[encoding] = console.file.buffer.getvalue().decode(encoding)
    assert "\u2581\u2585\u2588" in shown["utf-8"]
    assert shown["ascii"].isascii()


# where it comes from


class Mute(Local, frozen=True, kw_only=True):
    """A scheduler that does not answer."""

    def queue(self, run):
        raise SchedulerError("squeue: Unable to contact slurm controller")


@pytest.fixture
def read(run):
    def config(*overrides, executor='executor={type="local"}'):
        words = ["model=nowhere", "steps=48", 'sandbox={type="process"}', executor, *overrides]
        return configuration.read(ROOT / "configs/demo.toml", overrides=words)

    return config


def publish(run, **changes):
    atomic.put(run.status, report(**changes))
    atomic.put(run.endpoints, EndpointTable(beat=1, endpoints=[engine(VERSION)], newest=VERSION))


def submitted(run, role, number, job, *codes, at=0.0):
    submissions.take(run, role, number)
    noted = Submitted(job=job, count=len(codes), host="h", at=at or time.time())
    atomic.put(run.submitted(role, number), noted)
    for index, code in enumerate(codes):
        said = Started(job="9", host="c1", pid=1, start_time="1", at=at, seconds=3.0, code=code)
        atomic.put(run.started(role, number, index), said)


def test_before_the_first_report_the_queue_is_shown_with_its_age(run, read):
    run.endpoints.parent.mkdir(exist_ok=True)
    submitted(run, "rollout", 1, "77:1", at=time.time() - 600)
    text = screen(RunReader(run, read()).look())
    assert "waits for the first report of the coordinator" in text
    assert rows(text)["rollout"][1:] == ["1", "0", "0", "10", "min", "ago"]
    assert rows(text)["reward"][-1] == "-"


def test_silence_of_the_scheduler_is_said_and_the_rest_is_shown(run, read):
    publish(run)
    text = screen(RunReader(run, read(executor=f'executor={{type="{__name__}:Mute"}}')).look(), 120)
    assert "error: the scheduler does not answer" in text
    assert "Unable to contact slurm controller" in text
    assert rows(text)["learner"][1:] == ["1", "?", "?", "1", "0"]
    assert "step 12/48" in text


def test_failed_submissions_say_what_their_jobs_and_logs_said(run, read):
    publish(run)
    for number in (1, 2, 3):
        submitted(run, "reward", number, f"{number}77:1", 1, 2)
    run.logs("reward").mkdir(parents=True)
    (run.logs("reward") / "377_0_log.out").write_text("starting\nerror: [grader] no pytest\n\n")
    text = screen(RunReader(run, read()).look(), 120)
    assert "reward: exit code" in text
    assert "3 submissions running, so ticks rest 10 min after each" in text
    assert "error: logs/reward/377_0_log.out: error: [grader] no pytest" in text


def test_jobs_that_died_before_they_reported_show_what_their_log_says(run, read):
    publish(run)
    submitted(run, "reward", 1, "77")
    assert RunReader(run, read()).look().queue.failures == [], (
        "cancelled, perhaps: jobs that begin have a log"
    )
    run.logs("reward").mkdir(parents=True)
    (run.logs("reward") / "77_0.log").write_text(
        "error: [executor] setup: 'modul' fails with exit code 127\n"
    )
    text = screen(RunReader(run, read()).look(), 120)
    assert "error: reward: no job reported its start" in text
    assert "error: logs/reward/77_0.log: error: [executor] setup: 'modul' fails with exit code 127" in text


def test_finished_run_has_nobody_at_work_and_waits_for_nothing(run, read):
    publish(run)
    before = screen(RunReader(run, read()).look(), 120)
    run.finished.touch()
    after = screen(RunReader(run, read()).look(), 120)
    assert "waits for results" in before
    assert "1 at v000012-i01" in before
    assert "waits for" not in after
    assert "none serves" in after
    assert rows(after)["rollout"][1:4] == ["0", "0", "0"]
    assert "v000012-i01" in after, "what it came to stays"


def test_watching_asks_the_scheduler_no_more_than_every_fifteen_seconds(run, read):
    publish(run)
    now = [0.0]
    reader = RunReader(run, read(), lambda: now[0])
    first = reader.look()
    now[0] = 14.9
    publish(run, step=13)
    second = reader.look()
    assert second.queue is first.queue
    assert (first.report.step, second.report.step) == (12, 13)
    now[0] = 15.0
    assert reader.look().queue is not first.queue


@pytest.mark.parametrize("skew_s", [-7200.0, 7200.0])
@pytest.mark.parametrize("lives", [True, False])
def test_a_coordinator_is_silent_by_its_reports_and_not_by_clocks(run, read, skew_s, lives):
    """A file's time comes from a server, or from the coordinator's node."""

    def report_as(beat):
        publish(run, beat=beat)
        os.utime(run.status, times=(time.time() + skew_s,) * 2)

    report_as(0)
    poll_s = 60.0 if lives else 0.1  # a living one is seen at its next report, however slow the machine
    config = read(f"poll_s={poll_s}", executor=f'executor={{type="{__name__}:Mute"}}')
    is_over = threading.Event()

    def live():
        for beat in count(1):
            if is_over.wait(0.05):
                return
            report_as(beat)

    coordinator = threading.Thread(target=live)
    if lives:
        coordinator.start()
    found = RunReader(run, config).look_twice()
    is_over.set()
    assert ("has not reported for 2 h" in screen(found)) == (not lives)


@pytest.mark.slow
def test_watch_ends_with_the_run_and_survives_a_malformed_report(tmp_path, read):
    os.umask(0o077)
    run = RunDir(tmp_path / "other")
    model = empty_model(tmp_path / "model")
    control.start(run, read(f"model={model}", "tasks.train=2", "tasks.eval=1", *NOBODY))
    publish(run)
    line = [sys.executable, "-m", "hpc_swe.status", str(run.root), "--watch"]
    watcher = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    time.sleep(1.0)
    run.status.write_text("{")
    time.sleep(2.0)
    publish(run, step=48, waits_for="")
    run.finished.touch()
    text, _ = watcher.communicate(timeout=600)
    assert watcher.returncode == 0
    assert "step 48/48" in text
