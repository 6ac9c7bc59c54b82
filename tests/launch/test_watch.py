"""What a command that watches a run waits for, and what ends it, with a scheduler that is played."""

import time

import pytest

from hpc_swe.base.errors import ConfigError, DeadlineError, HpcSweError, StorageError
from hpc_swe.base.records import Node, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.cluster.executors.base import Job
from hpc_swe.launch.submit import REST_S, TickResult
from hpc_swe.launch.watch import SAVE_S, given_up, watch
from tests.kit.constants import status_report
from tests.kit.coordinator_kit import export, save
from tests.kit.played import Config, Played

WAIT_S = 60.0
RUNNING, LEARNER, WAITING, HELD = (
    Job("rollout", "7_0", 1, "running"),
    Job("learner", "9", 1, "running"),
    Job("rollout", "7_1", 1, "waiting", "Priority"),
    Job("coordinator", "8", 1, "held", "JobHeldUser"),
)


class Scripted(Played):
    """Before each answer about the queue, or about a submission, the next thing happens."""

    def __init__(self, *happens, jobs=()):
        super().__init__(running=list(jobs))
        self.happens = list(happens)

    def queue(self, run):
        if self.happens:
            self.happens.pop(0)(self)
        return super().queue(run)

    def submit(self, run, submission):
        if self.dies == "refused":
            raise ConfigError("sbatch refuses it: Required partition not available (inactive or drain)")
        return super().submit(run, submission)


def nothing(_):
    pass


def silence(scheduler):
    scheduler.dies = "silent"


def refusal(scheduler):
    scheduler.dies = "refused"
    scheduler.running.clear()


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


def test_a_passing_refusal_of_a_lost_role_stops_no_healthy_job(run):
    """The only job has ended, and a partition is drained or a limit is reached for some minutes."""
    scheduler = Scripted(refusal, nothing, silence, refusal, health, jobs=[RUNNING])

    def finish(_):
        assert [job.role for job in scheduler.running] == ["rollout"], "submitted once it is accepted"
        run.finished.touch()

    scheduler.happens += [finish, end]
    watch(run, config(scheduler), WAIT_S, stop_on="deadline")
    assert not run.stop.exists()


def test_jobs_that_keep_dying_end_the_watch_at_once(run):
    scheduler = Scripted(*[end] * 4)
    with pytest.raises(DeadlineError, match="rollout: its last 3 submissions failed"):
        watch(run, config(scheduler), WAIT_S, stop_on="deadline")
    assert run.stop.exists()


def test_a_run_that_was_ordered_to_end_has_not_succeeded(run):
    with pytest.raises(HpcSweError, match="ordered to end before it had finished"):
        watch(run, config(Scripted(lambda _: run.drain.touch(), end)), WAIT_S)


def test_a_refusal_is_logged_once_and_not_at_every_look(run, caplog):
    scheduler = Scripted(refusal, *[nothing] * 5, health, lambda _: run.finished.touch(), end)
    watch(run, config(scheduler), WAIT_S)
    assert [record.message for record in caplog.records if "refuses" in record.message] == [
        "stuck rollout: sbatch refuses it: Required partition not available (inactive or drain)"
    ]


@pytest.mark.parametrize(
    ("plan", "ago_s", "roles"),
    [
        (TickResult(), 0.0, []),
        (TickResult(stuck={"reward": "failed"}), 0.0, []),  # a part of its jobs lives
        (TickResult(stuck={"reward": "failed"}, lost=["reward"]), 0.0, ["reward"]),
        (TickResult(stuck={"reward": "refused"}, lost=["reward"], refused=["reward"]), 0.0, []),
        (TickResult(stuck={"reward": "refused"}, lost=["reward"], refused=["reward"]), REST_S, ["reward"]),
        (TickResult(stuck={"reward": "refused"}, refused=["reward"]), REST_S, []),
    ],
)
def test_a_refused_role_has_time_and_a_failed_one_has_none(plan, ago_s, roles):
    now = time.monotonic()
    assert given_up(plan, {"reward": now - ago_s}, now) == roles


def test_the_deadline_holds_while_the_scheduler_is_silent(run):
    scheduler = Scripted(silence)
    with pytest.raises(DeadlineError, match="not finished after 0 s"):
        watch(run, config(scheduler), 0.0)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StorageError("the disk of this node is full")])
def test_trouble_of_the_watch_leaves_the_jobs_of_a_cluster(run, error):
    def fail(_):
        raise error

    with pytest.raises(type(error)):
        watch(run, config(Scripted(jobs=[RUNNING])), WAIT_S, fail, stop_on="deadline")
    assert not run.stop.exists()


@pytest.fixture
def learning(run):
    """A run whose learner has taken steps since its last checkpoint, and a command that Ctrl-C ends."""
    node = Node(owner="learner-9-1", role="learner", beat=1, host="here", pid=1, step=5)
    atomic.put(run.node(node.owner), node)

    def interrupt(_):
        raise KeyboardInterrupt

    def start(*happens, save_s=SAVE_S):
        scheduler = Scripted(nothing, interrupt, *happens, jobs=[RUNNING, LEARNER])
        with pytest.raises(KeyboardInterrupt):
            watch(run, config(scheduler), WAIT_S, stop_on="error", save_s=save_s)
        assert (scheduler.running, scheduler.happens, run.stop.exists()) == ([], [], True)

    return start, interrupt


def test_ctrl_c_lets_a_learner_save_its_steps_before_all_is_stopped(run, learning, caplog):
    def save(scheduler):
        assert (run.drain.exists(), run.stop.exists()) == (True, False)
        scheduler.running.remove(LEARNER)

    learning[0](nothing, nothing, nothing, save, end)
    assert "saving the last 5 steps, for at most 120 s; another Ctrl-C discards that" in caplog.text


def test_ctrl_c_says_how_many_steps_a_slow_learner_has_not_saved(learning, caplog):
    learning[0](nothing, nothing, nothing, nothing, end, save_s=0.0)
    assert "not saved within 0 s: the last 5 steps" in caplog.text


def test_a_second_ctrl_c_does_not_wait_for_the_learner(run, learning):
    start, interrupt = learning
    start(nothing, nothing, nothing, interrupt, nothing, end)


def test_ctrl_c_gives_a_learner_without_new_steps_no_time(run, learning):
    atomic.put(run.node("learner-9-1"), Node(owner="x", role="learner", beat=1, host="here", pid=1, step=0))
    learning[0](nothing, nothing, end)
    assert not run.drain.exists()


def test_ctrl_c_waits_for_weights_that_others_open(run, learning, caplog):
    first, delta, full = (
        WeightVersion(incarnation=each, step=step) for each, step in ((1, 0), (1, 5), (2, 5))
    )
    export(run, first)
    export(run, delta, first)
    save(run, 5, 1)
    learning[0](nothing, nothing, lambda _: export(run, full), nothing, end)
    assert "saving the last weights in full" in caplog.text
    assert "not saved" not in caplog.text


def test_what_keeps_engines_from_their_work_is_said_once(run, caplog):
    def report(**troubles):
        return lambda _: atomic.put(run.status, status_report(troubles=troubles))

    refused = report(engine_1="refused v000001-i01: the probe", engine_2="refused v000001-i01: the probe")
    works = [report(), nothing, report(engine_2="restart 1 of 5: no answer")]
    scheduler = Scripted(refused, nothing, *works, lambda _: run.finished.touch(), end, jobs=[RUNNING])
    watch(run, config(scheduler), WAIT_S)
    said = [record.message for record in caplog.records if "engine_" in record.message]
    assert [line.partition(": ")[2] for line in said] == [
        "refused v000001-i01: the probe",
        "restart 1 of 5: no answer",
    ]


def test_a_disk_without_room_is_said_at_the_next_look(tmp_path, tmpfs, caplog):
    run = RunDir(tmpfs(tmp_path / "small", "size=64k"))
    run.make()
    scheduler = Scripted(nothing, nothing, nothing, lambda _: run.finished.touch(), end, jobs=[RUNNING])
    watch(run, config(scheduler), WAIT_S)
    said = f"jobs wait for room: {run.launches}/room: no space is left; free some"
    assert [record.message.partition(",")[0] for record in caplog.records] == [said]
