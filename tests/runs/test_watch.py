"""What a command that watches a run waits for, and what ends it, with a scheduler that is played."""

import pytest

from hpc_swe.errors import DeadlineError
from hpc_swe.plugins.executors.base import Job
from hpc_swe.rundir import RunDir
from hpc_swe.runs.watch import watch
from tests.kit.played import Config, Played

WAIT_S = 60.0
RUNNING, WAITING, HELD = (
    Job("rollout", "7_0", 1, "running"),
    Job("rollout", "7_1", 1, "waiting", "Priority"),
    Job("coordinator", "8", 1, "held", "JobHeldUser"),
)


class Scripted(Played):
    """Before each answer about the queue the next thing happens."""

    def __init__(self, *happens, jobs=()):
        super().__init__(running=list(jobs))
        self.happens = list(happens)

    def queue(self, run):
        if self.happens:
            self.happens.pop(0)(self)
        return super().queue(run)


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.make()
    return run


def nothing(_):
    pass


def silence(scheduler):
    scheduler.dies = "silent"


def health(scheduler):
    scheduler.dies = ""


def end(scheduler):
    scheduler.running.clear()


def config(scheduler, rollout=1):
    return Config(scheduler, {"rollout": rollout, "reward": 0, "inference": 0, "coordinator": 0})


def test_a_finished_run_is_not_waited_for_because_of_jobs_that_never_ran(run):
    scheduler = Scripted(nothing, nothing, jobs=[RUNNING, WAITING, HELD])

    def finish(_):
        run.finished.touch()

    scheduler.happens += [finish, nothing, nothing, end]
    watch(run, config(scheduler, 2), WAIT_S)
    assert scheduler.happens == [], "what runs is waited for"
    assert "submit" not in scheduler.asked


def test_a_scheduler_that_is_silent_at_the_end_ends_nothing(run):
    run.finished.touch()
    scheduler = Scripted(silence, silence, health, end, jobs=[RUNNING])
    watch(run, config(scheduler), WAIT_S, stop_on="error")
    assert not run.stop.exists()


def test_jobs_that_keep_dying_end_the_watch_at_once(run):
    scheduler = Scripted(*[end] * 4)
    with pytest.raises(DeadlineError, match="rollout: its last 3 submissions failed"):
        watch(run, config(scheduler), WAIT_S, stop_on="deadline")
    assert run.stop.exists()


def test_the_deadline_holds_while_the_scheduler_is_silent(run):
    scheduler = Scripted(silence)
    with pytest.raises(DeadlineError, match="not finished after 0 s"):
        watch(run, config(scheduler), 0.0)
