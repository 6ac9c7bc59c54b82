"""What a tick decides, by tables; what it does, with a scheduler that is played."""

import errno
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_swe.base.errors import SchedulerError, StorageError
from hpc_swe.base.records import RunManifest, WeightVersion
from hpc_swe.base.store import atomic, skipped, submissions
from hpc_swe.base.store.submissions import ConfirmedSubmission, LatestSubmission, Rest, Started, Submitted
from hpc_swe.cluster.executors.base import INTERPRETER, Job
from hpc_swe.cluster.executors.slurm import parse_queue
from hpc_swe.config.settings import LearnerConfig
from hpc_swe.launch import existing
from hpc_swe.launch import submit as run_submit
from hpc_swe.launch.submit import Decision, decide, failures
from hpc_swe.models.policies.megatron import Megatron
from tests.kit.constants import varied
from tests.kit.coordinator_kit import export, save
from tests.kit.played import Config, Played


def job(number: int, state: str = "running", submission: int = 1) -> Job:
    return Job("rollout", f"{submission}7_{number}", submission, state)


NOTED, OPEN, DOUBTED = (
    LatestSubmission(1),
    LatestSubmission(1, is_open=True),
    LatestSubmission(1, is_open=True, is_doubted=True),
)
RUNNING, WAITING = [job(0), job(1)], [job(0, "waiting"), job(1, "waiting")]


@pytest.mark.parametrize(
    ("jobs", "newest", "decision"),
    [
        ([], LatestSubmission(), Decision(missing=2)),
        (RUNNING[:1], NOTED, Decision(missing=1)),
        (RUNNING, NOTED, Decision()),
        (WAITING, NOTED, Decision()),
        ([*RUNNING, job(2)], NOTED, Decision()),  # what runs is never cancelled
        ([*RUNNING, job(0, "waiting", 2)], LatestSubmission(2), Decision(cancel=["27_0"])),
        ([*WAITING, job(0, "waiting", 2)], LatestSubmission(2), Decision(cancel=["27_0"])),
        ([job(0, "held"), job(1)], NOTED, Decision()),  # somebody holds it, and knows why
        ([job(0, "broken"), job(1)], NOTED, Decision(missing=1, cancel=["17_0"])),
        (RUNNING, OPEN, Decision(close="17")),
        ([], OPEN, Decision(doubt=True)),
        ([], DOUBTED, Decision(missing=2, void=True)),
        ([job(0, submission=1)], LatestSubmission(2, is_open=True), Decision(doubt=True)),
        (
            [job(0, submission=1)],
            LatestSubmission(2, is_open=True, is_doubted=True),
            Decision(missing=1, void=True),
        ),
    ],
)
def test_decision(jobs, newest, decision):
    assert decide(2, jobs, newest) == decision


def test_queue_of_slurm_is_read_by_name_and_ids_of_others_are_not_ours():
    listing = """\
17_3|2|PENDING|Priority|rollout:demo-a1b2c3
18|1|RUNNING|None|demo-a1b2c3:learner
19|1|COMPLETING|None|demo-a1b2c3:reward
20|1|PENDING|launch failed requeued held|demo-a1b2c3:coordinator
21|1|PENDING|JobHeldUser|demo-a1b2c3:inference
22|(null)|RUNNING|None|interactive | of mine
24|two
lines|PENDING|None|of mine
25|1|RUNNING|None|demo-a1b2c3:what
26|1|PREEMPTED|None|demo-a1b2c3:rollout
27|1|PENDING|PartitionConfig|demo-a1b2c3:reward
23|1|RUNNING|None|demo-ffffff:rollout
"""
    assert parse_queue(listing, "demo-a1b2c3") == [
        Job("rollout", "17_3", 2, "waiting", "Priority"),
        Job("learner", "18", 1, "running", "None"),
        Job("coordinator", "20", 1, "broken", "launch failed requeued held"),
        Job("inference", "21", 1, "held", "JobHeldUser"),
        Job("reward", "27", 1, "held", "PartitionConfig"),
    ]


def started(code=1, seconds=3.0, at=0.0):
    return Started(job="7", host="c1", pid=1, start_time="1", at=at, seconds=seconds, code=code)


@pytest.mark.parametrize(
    ("said", "endings", "count"),
    [
        ([[started()]] * 3, {}, 3),
        ([[started()], [started(code=0)], [started()]], {}, 1),
        ([[started()] * 2, [started(), started(code=0)]], {}, 0),
        ([[started(), started(code=0, seconds=-1)]] * 3, {}, 0),  # one of each still runs
        ([[]] * 3, {}, 0),  # cancelled while they waited, or the book is not to be had
        ([[]] * 3, {"7": "CANCELLED by 0 0:0"}, 0),
        ([[]] * 3, {"7": "FAILED 127:0"}, 3),  # python is not there on the node
        ([[started(code=0, seconds=-1)]] * 2, {"7": "OUT_OF_MEMORY 0:125"}, 2),
        ([[started(code=0, seconds=-1)]] * 2, {"7": "NODE_FAIL 0:0"}, 0),
        ([[started(code=0, seconds=-1)]] * 2, {"7": "PREEMPTED 0:0"}, 0),
        ([[started()], [], [started()], []], {}, 2),  # what the book does not tell yet is passed over
        ([[started()], [], [started()], []], {"7": "RUNNING 0:0"}, 2),
        ([[started()], [started(code=0, seconds=-1)]], {}, 1),  # died without a word, and not in the book yet
        ([[started()], [started(code=0)], []], {}, 0),
        ([[started()]] * 3, None, 3),
        ([[started()]] * 3 + [[]], None, 4),  # no book will ever tell of the last, which died before jobs.run
        ([[]] * 3, None, 3),
        ([[], [], [started(code=0)]], None, 0),
        ([[], [], [started(code=0, seconds=-1)]], None, 0),  # it began, and then its node was lost
    ],
)
def test_failures_in_a_row(said, endings, count):
    assert len(failures(histories(said), endings, ())) == count


def histories(said):
    submitted = Submitted(job="7", count=1, host="login", at=0.0)
    return [ConfirmedSubmission(number, submitted, jobs) for number, jobs in enumerate(said)]


@pytest.fixture
def config():
    return Config(Played(), {"rollout": 200, "reward": 0, "inference": 0, "coordinator": 0})


def test_two_hundred_workers_cost_one_question_and_one_submission(run, config):
    assert run_submit.tick(run, config).submit == {"rollout": 200}
    del config.executor.running[150:]
    config.executor.asked.clear()
    assert run_submit.tick(run, config).submit == {"rollout": 50}
    assert [config.executor.asked.count(word) for word in ("queue", "endings", "submit")] == [1, 1, 1]


def test_arrays_are_no_longer_than_the_scheduler_takes(run, config):
    config.executor.array_size = 80
    assert run_submit.tick(run, config).submit == {"rollout": 200}
    assert submissions.newest(run, "rollout").number == 3
    assert len(config.executor.running) == 200


@pytest.mark.parametrize("count", [2, 8])
def test_ticks_at_once_submit_once(run, config, count):
    """Jobs of a submission that a third tick voids, while the first is slow, end at once and do not count."""
    ready = threading.Barrier(count)

    def tick():
        ready.wait()
        run_submit.tick(run, config)

    for expected in (200, 200, 200):
        threads = [threading.Thread(target=tick) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        voided = submissions.newest(run, "rollout").voided
        living = [job for job in config.executor.running if job.submission not in voided]
        assert len(living) == expected
        config.executor.running = living[100:]
        run_submit.tick(run, config)  # a submission that a slower tick doubted is closed by now
        run_submit.tick(run, config)


@pytest.mark.parametrize(("dies", "second"), [("after", {}), ("before", {"rollout": 200})])
def test_a_tick_that_dies_is_closed_by_the_next_or_made_good_after_two(run, config, dies, second):
    config.executor.dies = dies
    with pytest.raises(KeyboardInterrupt):
        run_submit.tick(run, config)
    config.executor.dies = ""
    assert [run_submit.tick(run, config).submit for _ in range(2)] == [{}, second]
    assert not submissions.newest(run, "rollout").is_open
    assert run.marked("rollout", 1, submissions.VOID).exists() == (dies == "before")
    assert len(config.executor.running) == 200


def test_jobs_of_a_tick_that_was_slow_and_not_dead_make_way(run, config):
    submissions.take(run, "rollout", 1)
    submissions.mark(run, "rollout", 1, submissions.DOUBTED)
    assert run_submit.tick(run, config).submit == {"rollout": 200}
    late = [Job("rollout", f"1_{n}", 1, "running") for n in range(200)]
    config.executor.running += late
    plan = run_submit.tick(run, config)
    assert (plan.submit, sorted(plan.cancel)) == ({}, sorted(job.job for job in late))
    assert {job.submission for job in config.executor.running} == {2}


def test_refusal_is_told_and_tried_again(run, config):
    config.executor.dies = "refused"
    plan = run_submit.tick(run, config)
    assert "no such partition" in plan.stuck["rollout"]
    assert plan.refused == plan.lost == ["rollout"]
    assert submissions.newest(run, "rollout") == LatestSubmission(), "a refused submission leaves nothing"
    config.executor.is_here = True
    plan = run_submit.tick(run, config)
    assert (plan.refused, plan.lost) == ([], ["rollout"]), "a machine does not change its mind"
    config.executor.dies = ""
    assert run_submit.tick(run, config).submit == {"rollout": 200}


def test_cell_that_a_dying_node_left_empty_stops_no_tick(run, config):
    run_submit.tick(run, config)
    run.started("rollout", 1, 0).write_bytes(b"")
    config.executor.running.clear()
    assert run_submit.tick(run, config).submit == {"rollout": 200}


def test_silent_scheduler_means_that_nothing_is_submitted(run, config):
    config.executor.dies = "silent"
    with pytest.raises(SchedulerError):
        run_submit.tick(run, config)
    assert submissions.newest(run, "rollout") == LatestSubmission()


MIXED = [job(0), job(1, "waiting"), job(2, "held"), job(3, "broken")]


def write_manifest(run, **environment):
    empty = dict.fromkeys(("commit", "model_sha256", "config_sha256", "folder"), "")
    made = RunManifest(**empty, protocol=1, run_id=f"demo-{os.getpid()}", environment=environment)
    atomic.put(run.manifest, made)


def test_a_tick_of_another_python_submits_jobs_of_that_of_the_start(run, config):
    """Cron's tick may belong to an environment for CPUs."""
    write_manifest(run, **{INTERPRETER: "/gpu/bin/python"})
    assert run_submit.submission(run, config, "rollout", 1, 1).command[0] == "/gpu/bin/python"
    existing.note_interpreter(run, config)
    assert run_submit.submission(run, config, "rollout", 1, 1).command[0] == sys.executable


def test_setup_finds_the_runs_whose_jobs_use_its_environment(run, config, tmp_path):
    write_manifest(run)
    folder = Path(sys.prefix, "runs")
    folder.mkdir(exist_ok=True)
    link, other = folder / f"demo-{os.getpid()}", folder / f"other-{os.getpid()}"
    link.unlink(missing_ok=True)
    other.symlink_to(tmp_path / "of-another-node")
    for count in (0, 200):
        config.counts["rollout"] = count
        existing.note_interpreter(run, config)
        assert link.exists() == bool(count)
    assert link.resolve() == run.root.resolve()
    assert other.is_symlink(), "who does not see a run cannot say that it is gone"


@pytest.mark.parametrize("order", ["DRAIN", "STOP", "FINISHED"])
def test_under_an_order_what_does_not_run_is_cancelled(run, config, order):
    """It would hold its place in the queue for days, and get its GPUs only to end at once."""
    config.executor.running += MIXED
    (run.control / order).touch()
    plan = run_submit.tick(run, config)
    assert (plan.orders, plan.cancel) == ([order], ["17_1", "17_2", "17_3"])
    assert (plan.running, config.executor.running) == (["17_0"], MIXED[:1])
    assert config.executor.asked == ["queue"], "nothing is submitted, and one question is enough"


def test_an_order_that_a_start_removes_meanwhile_cancels_nothing(run, config):
    config.executor.running += MIXED
    run.drain.touch()
    ask = config.executor.queue

    def queue(run):
        run.drain.unlink()
        return ask(run)

    config.executor.queue = queue
    assert run_submit.tick(run, config).cancel == []
    assert config.executor.running == MIXED


def test_a_run_that_finishes_while_the_queue_is_read_gets_no_job_more(run, config):
    config.executor.running.append(job(0, "waiting"))
    ask = config.executor.queue

    def queue(run):
        run.finished.touch()
        return ask(run)

    config.executor.queue = queue
    assert run_submit.tick(run, config).submit == {}
    assert config.executor.running == []


@pytest.mark.parametrize(("checkpoint", "submitted"), [(None, 1), (3, 1), (5, 0)])
def test_learner_lost_before_its_last_checkpoint_is_submitted_again(run, config, checkpoint, submitted):
    """The coordinator waits for that checkpoint, and a checkpoint that only has the name is none."""
    config.mode, config.counts = "sft", {"coordinator": 0}
    export(run, WeightVersion(step=5, incarnation=1))
    if checkpoint:
        save(run, checkpoint, 1)
    run.checkpoint(5, 1).mkdir(exist_ok=True)
    config.policy, config.learner = Megatron(), LearnerConfig()
    assert sum(run_submit.tick(run, config).submit.values()) == submitted


def test_nothing_is_submitted_when_the_learner_would_skip_the_same_batches(run, config):
    config.mode, config.counts = "sft", {}
    config.policy, config.learner = Megatron(), varied(LearnerConfig, max_skipped=1)()
    for step in (7, 8):
        assert sum(run_submit.tick(run, config).submit.values()) <= 2
        skipped.enter(run, step, is_skipped=True)
    config.executor.running.clear()
    for _ in range(5):
        found = run_submit.tick(run, config)
        assert found.submit == {}
        said = "more than 1 batches in a row, 2, the last of them batch 8"
        assert said in found.stuck["learner"]
    config.learner = varied(LearnerConfig, max_skipped=2)()
    assert run_submit.tick(run, config).submit == {"coordinator": 1, "learner": 1}


FOREIGN = (
    "notes.txt",
    "stop",
    "DRAIN~",
    "STOP.old",
    "\udcff",
    "999999",
    "000007",
    "x.void",
    "\u0661.void",
    "-1",
)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir], ids=["file", "folder"])
def test_foreign_names_in_control_and_launch_stop_no_tick(run, config, make):
    for folder in (run.control, run.launches, run.launches / "rollout"):
        for name in FOREIGN:
            make(folder / name)
    for expected in ({}, {"rollout": 200}, {}):  # 000007 looks like a tick that died, which takes two looks
        assert run_submit.tick(run, config).submit == expected
    assert submissions.newest(run, "rollout").number == 8
    assert submissions.jobs(run, "rollout")[-1][0] == 8


def test_role_that_keeps_failing_is_left_alone_until_it_has_rested(run, config):
    for number in (1, 2, 3):
        assert run_submit.tick(run, config).submit == {"rollout": 200}
        atomic.put(run.started("rollout", number, 0), started())
        config.executor.running.clear()
    plan = run_submit.tick(run, config)
    assert "failed (exit code 1 on c1)" in plan.stuck["rollout"]
    assert plan.refused == [], "the scheduler would take them"
    known = time.monotonic() - run_submit.REST_S
    rest = Rest(number=3, since={"another-login-node": known, socket.gethostname(): known + 30.0})
    atomic.put(run.rest("rollout"), rest)
    assert run_submit.tick(run, config).lost == ["rollout"], "the clock of another host says nothing"
    atomic.put(run.rest("rollout"), Rest(number=3, since={socket.gethostname(): known}))
    assert run_submit.tick(run, config).submit == {"rollout": 200}
    atomic.put(run.started("rollout", 4, 0), started())
    config.executor.running.clear()
    assert run_submit.tick(run, config).lost == ["rollout"], "the next failure rests as long"


@pytest.mark.parametrize("is_open", [True, False])
def test_what_another_tick_submits_meanwhile_has_not_failed(run, config, is_open):
    """Its jobs are not in the queue that was read before, and have had no time to report."""
    for _ in range(2):
        assert run_submit.tick(run, config).submit == {"rollout": 200}
        config.executor.running.clear()
    if is_open:  # it was taken long ago, and is confirmed only now
        submissions.take(run, "rollout", 3)
        submissions.mark(run, "rollout", 3, submissions.DOUBTED)
    ask = config.executor.queue

    def queue(_):
        found = ask(run)
        submissions.take(run, "rollout", 3)
        atomic.put(run.submitted("rollout", 3), Submitted(job="3", count=200, host="other", at=0.0))
        return found

    config.executor.queue = queue
    assert run_submit.tick(run, config).stuck == {}


def test_submission_of_which_a_job_lives_has_not_failed(run, config):
    for _ in range(3):
        assert run_submit.tick(run, config).submit == {"rollout": 200}
        last = config.executor.running.pop()
        config.executor.running.clear()
    config.executor.running.append(last)
    assert run_submit.tick(run, config).submit == {"rollout": 199}


def test_a_void_submission_whose_jobs_ended_in_silence_has_not_failed(run, config):
    for _ in range(3):
        assert run_submit.tick(run, config).submit == {"rollout": 200}
        config.executor.running.clear()
    submissions.mark(run, "rollout", 3, submissions.VOID)
    assert run_submit.tick(run, config).submit == {"rollout": 200}


def test_after_a_rest_one_submission_is_tried_and_not_one_per_tick(run, config):
    """Accounting lags behind the queue: it does not know for minutes what has become of the last one."""
    config.executor.endings = lambda jobs: {}
    for number in (1, 2, 3):
        assert run_submit.tick(run, config).submit == {"rollout": 200}
        atomic.put(run.started("rollout", number, 0), started())
        config.executor.running.clear()
    assert run_submit.tick(run, config).lost == ["rollout"]
    for number in (3, 4):
        known = time.monotonic() - run_submit.REST_S
        atomic.put(run.rest("rollout"), Rest(number=number, since={socket.gethostname(): known}))
        assert run_submit.tick(run, config).submit == {"rollout": 200}
        config.executor.running.clear()
        for _ in range(3):
            assert run_submit.tick(run, config).lost == ["rollout"]


@pytest.mark.parametrize("skew_s", [-86_400.0, -3600.0, 0.0, 3600.0])
def test_a_node_whose_clock_is_wrong_changes_no_rest(run, config, skew_s):
    for number in (1, 2, 3):
        assert run_submit.tick(run, config).submit == {"rollout": 200}
        atomic.put(run.started("rollout", number, 0), started(at=time.time() + skew_s))
        note = atomic.get(run.submitted("rollout", number), Submitted)  # by a login node with such a clock
        atomic.put(run.submitted("rollout", number), replace(note, at=time.time() + skew_s))
        config.executor.running.clear()
    for _ in range(3):
        assert run_submit.tick(run, config).lost == ["rollout"]
    atomic.put(run.rest("rollout"), Rest(number=3, since={socket.gethostname(): time.monotonic() - 601.0}))
    assert run_submit.tick(run, config).submit == {"rollout": 200}


def test_a_person_s_start_does_not_rest(run, config):
    for number in (1, 2, 3):
        run_submit.tick(run, config)
        atomic.put(run.started("rollout", number, 0), started(at=time.time()))
        config.executor.running.clear()
    assert run_submit.tick(run, config).lost == ["rollout"]
    assert run_submit.tick(run, config, rests=False).submit == {"rollout": 200}


def test_a_tick_that_was_frozen_cancels_and_submits_nothing(run, config):
    """What waited when it asked may run by now, and another tick has replaced what was missing."""
    config.counts["rollout"] = 0
    config.executor.running.append(Job("rollout", "7", 7, "waiting"))
    with pytest.raises(SchedulerError, match="the next tick looks again"):
        run_submit.tick(run, config, fresh_s=0.0)
    assert len(config.executor.running) == 1
    assert atomic.names(run.launches / "rollout") == []


def test_a_tick_that_was_frozen_under_an_order_cancels_nothing(run, config):
    config.executor.running += MIXED
    run.finished.touch()
    with pytest.raises(SchedulerError, match="the next tick looks again"):
        run_submit.tick(run, config, fresh_s=0.0)
    assert config.executor.running == MIXED


def test_a_full_disk_at_a_submission_is_one_error_and_is_made_good(run, config):
    def submit(run, submission):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "batch.sh")

    submits, config.executor.submit = config.executor.submit, submit
    with pytest.raises(StorageError, match=f"{run.logs('rollout')}: the quota is used up"):
        run_submit.tick(run, config)
    config.executor.submit = submits
    assert run_submit.tick(run, config).submit == {}
    assert run_submit.tick(run, config).submit == {"rollout": 200}
