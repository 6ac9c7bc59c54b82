"""Evaluation, warm start, and the loop around them."""

import itertools
import threading
import time
from collections import Counter
from typing import get_args

import datasets
import msgspec
import numpy as np
import pytest

from hpc_swe.base.errors import DeadlineError, LostRace, StorageError
from hpc_swe.base.metrics import Log
from hpc_swe.base.records import (
    EndpointTable,
    Message,
    Role,
    RolloutRequest,
    Sampling,
    ScoredEpisode,
    StatusReport,
    WeightVersion,
)
from hpc_swe.base.store import atomic
from hpc_swe.base.store.lease import Lease
from hpc_swe.base.store.parquet import evals
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.base.store.spool import Spool
from hpc_swe.config.settings import WAIT_S, EvalConfig, GroupsConfig
from hpc_swe.roles.coordinator.batching import batches
from hpc_swe.roles.coordinator.loop import Coordinator
from hpc_swe.roles.coordinator.modes import sft
from hpc_swe.roles.coordinator.modes.evaluation import Evaluating, Evaluator, summary
from hpc_swe.roles.coordinator.snapshot import Progress
from hpc_swe.roles.coordinator.supervision import Supervision
from tests.kit.coordinator_kit import (
    HELD_OUT,
    NEVER_OLD,
    STEPS,
    Clock,
    export,
    finish,
    learn,
    make_maintenance,
    published,
    result,
    rundir,
    show,
    training,
    work,
)
from tests.kit.waiting import DEADLINE_S, until

POLL_S = 0.01


def evaluating(run, tasks=("x", "y"), config=HELD_OUT):
    return Evaluating(run, Evaluator(run, tasks, config, 5, Log(run.metric_log("c"))), 2)


def table(run, label="eval"):
    files = str(run.eval_table(label))
    return list(
        datasets.load_dataset("parquet", data_files=files, cache_dir=str(run.root / "cache"))["train"]
    )


# evaluation


def test_an_evaluation_makes_one_table_of_all_samples_and_ends(run):
    maintenance, mode = make_maintenance(run), evaluating(run)
    assert mode.iterate(maintenance.snapshot()).waits_for == "evaluation eval: 2 of 2 tasks"
    work(run, judge=lambda name: float(name.endswith("00")))
    assert mode.iterate(maintenance.snapshot()).waits_for == ""
    rows = table(run)
    assert [(r["task_id"], r["index"], r["sampling"]) for r in rows] == [
        (task, index, "plain" if index < 2 else "cool") for task in "xy" for index in range(4)
    ]
    assert [r["outcome"] for r in rows] == ["resolved", *["unresolved"] * 3] * 2
    assert rows[0]["versions"] == [f"v0000{NEVER_OLD}-i00"]
    assert rows[0]["messages"][1]["tool_calls"] == [{"name": "view", "arguments": '{"path": "m.py"}'}]
    whole = msgspec.msgpack.decode(rows[0]["record"], type=ScoredEpisode)
    assert whole == result(whole.episode.request, 1.0)
    assert not Spool(run.scored, RolloutRequest).addresses("ready")


def test_a_slower_coordinator_keeps_the_table_that_stands(run):
    """People and later rounds have read it."""
    maintenance, mode = make_maintenance(run), evaluating(run)
    mode.iterate(maintenance.snapshot())
    work(run, judge=lambda name: float("000000" in name))
    evaluating(run).iterate(maintenance.snapshot())
    evals.write(run.eval_table("eval"), evals.read(run.eval_table("eval"))[:4])
    before = run.eval_table("eval").read_bytes()
    log = Log(run.metric_log("slower"))
    Evaluator(run, ("x", "y"), HELD_OUT, 5, log)._write(0, [])  # it looked before the other had written
    assert run.eval_table("eval").read_bytes() == before
    assert log.recent["solve/eval/plain"][-1:] == [1.0]


def test_every_decoding_is_sampled_as_it_says(run):
    """Greedy answers would all be alike, so there is one."""
    config = EvalConfig(samples=2, decodings=HELD_OUT.decodings | {"greedy": Sampling(temperature=0.0)})
    evaluating(run, config=config).iterate(make_maintenance(run).snapshot())
    asked = {c.name: c.message for c in Spool(run.requests, RolloutRequest).claims("w")}
    assert [asked[f"eval-000001-0{i}"].sampling.temperature for i in range(5)] == [1, 1, 0.5, 0.5, 0]
    assert len({request.seed for request in asked.values()}) == len(asked) == 10


def test_what_infrastructure_failed_is_retried_then_counted_as_failed(run):
    maintenance, mode = make_maintenance(run), evaluating(run)
    for _ in range(4):
        progress = mode.iterate(maintenance.snapshot())
        work(run, judge=lambda name: None if name == "eval-000000-00" else 1.0)
    assert progress.waits_for == ""
    row = table(run)[0]
    assert (row["outcome"], row["reward"]) == ("infra_error", None)
    line = run.metric_log("c").read_text()
    assert '"solve/eval/plain":0.75' in line


def test_an_evaluation_goes_on_after_a_restart(run):
    maintenance = make_maintenance(run)
    evaluating(run).iterate(maintenance.snapshot())
    work(run, keep=lambda name: name.startswith("eval-000000"))
    for _ in range(2):
        evaluating(run).iterate(maintenance.snapshot())
    assert len(Spool(run.requests, RolloutRequest).addresses("ready")) == 4
    work(run)
    assert evaluating(run).iterate(maintenance.snapshot()).waits_for == ""
    assert len(table(run)) == 8


@pytest.mark.parametrize("decodings", [HELD_OUT.decodings, {"plain": Sampling(), "new": Sampling(top_k=5)}])
def test_an_evaluation_is_logged_again_by_the_next_coordinator(run, decodings):
    """The first one may have died between its table and its line."""
    maintenance, mode = make_maintenance(run), evaluating(run)
    mode.iterate(maintenance.snapshot())
    work(run, judge=lambda name: 1.0)
    mode.iterate(maintenance.snapshot())
    run.metric_log("c").unlink()
    evaluating(run, config=msgspec.structs.replace(HELD_OUT, decodings=decodings))
    assert '"solve/eval/plain":1.0' in run.metric_log("c").read_text()


def test_a_second_evaluator_leaves_when_the_first_is_done(run):
    maintenance, first, second = make_maintenance(run), evaluating(run), evaluating(run)
    for mode in (first, second):
        mode.iterate(maintenance.snapshot())
    work(run)
    assert [mode.iterate(maintenance.snapshot()).waits_for for mode in (first, second)] == ["", ""]
    for _ in range(2):
        second.iterate(maintenance.snapshot())
    assert not Spool(run.requests, RolloutRequest).addresses("ready")


def test_training_evaluates_every_so_many_steps_and_at_the_end(run):
    finish(run, every=2, eval_tasks=("x", "y", "z"))
    assert sorted(path.name for path in run.evals.iterdir()) == ["step_000000.parquet", "step_000002.parquet"]
    newest = {version for row in table(run, "step_000002") for version in row["versions"]}
    assert newest == {f"v0000{NEVER_OLD}-i00"}  # what the fake workers stamp


def test_the_last_evaluation_is_made_though_the_learner_ended_in_another(run):
    maintenance, mode = make_maintenance(run), training(run, every=1, eval_tasks=("x",))
    for _ in range(30):
        mode.iterate(maintenance.snapshot())
        work(run, keep=lambda name: name.startswith("train"))
        learn(run)
    finish(run, every=1, eval_tasks=("x",))
    assert [path.name for path in sorted(run.evals.iterdir())] == [
        "step_000000.parquet",
        "step_000003.parquet",
    ]


def test_no_round_begins_while_engines_have_later_weights(run):
    """A learner repeats steps meanwhile, and the results would stand under the name of earlier weights."""
    three = WeightVersion(step=3)
    one, again = WeightVersion(incarnation=1, step=1), WeightVersion(incarnation=1, step=3)
    mode, maintenance = training(run, every=1, eval_tasks=("x",)), make_maintenance(run)
    asked = []
    for newest, serves in ((one, three), (again, again)):
        export(run, newest)
        show(run, "inference-a", role="inference", state="ready", url="http://a", versions=[serves])
        mode.iterate(maintenance.snapshot())
        asked.append([a.identity for a in Spool(run.requests, RolloutRequest).addresses("ready")])
    assert [sum(name.startswith("eval") for name in names) for names in asked] == [0, 4]


def test_evaluation_does_not_change_what_is_trained(tmp_path):
    plain, watched = rundir(tmp_path / "a"), rundir(tmp_path / "b")
    finish(plain)
    finish(watched, every=1, eval_tasks=("x", "y"))
    assert published(plain) == published(watched)


def test_beside_training_evaluation_holds_a_quarter_of_the_slots(run):
    show(run, "rollout-1-00000001", slots=32)
    training(run, every=1, eval_tasks=tuple("abcdefgh")).iterate(make_maintenance(run).snapshot())
    asked = [a.identity for a in Spool(run.requests, RolloutRequest).addresses("ready")]
    assert sum(name.startswith("eval") for name in asked) == 8


def test_the_interval_is_over_tasks():
    rows = [
        Attempt(
            task_id=f"t{i}",
            index=n,
            sampling="greedy",
            sample=n,
            outcome="resolved" if i % 2 else "unresolved",
            reward=float(i % 2),
        )
        for i in range(100)
        for n in range(50)
    ]
    values = summary("greedy", rows)
    assert values["solve/eval/greedy"] == values["solve/eval_any/greedy"] == 0.5
    assert values["solve/eval_low/greedy"] == pytest.approx(0.4, abs=0.03)  # 100 tasks, not 5,000 episodes


# warm start


def sample(length, name):
    conversation = [Message(role="user", content=str(name)), Message(role="assistant", content="x" * length)]
    return next(sft.from_conversations([conversation], encode, 64, Counter()))


def encode(conversation):
    """One id per character; the assistant's are trained."""
    ids = [ord(c) for m in conversation for c in m.content]
    return ids, [int(m.role == "assistant") for m in conversation for _ in m.content]


def stream():
    return (sample(3 + n % 5, n) for n in itertools.count())


def warm_start(run, iteration_s: float = 10.0):
    schedule = sft.SftSchedule(STEPS, 4, 64, 2, iteration_s=iteration_s)
    return sft.WarmStart(run, stream(), schedule, Log(run.metric_log("c")))


def test_a_warm_start_of_long_samples_goes_on_in_the_next_iteration(tmp_path):
    """A coordinator whose main loop stands still is ended by its watchdog."""
    quick, slow = rundir(tmp_path / "a"), rundir(tmp_path / "b")
    warm_start(quick).iterate(make_maintenance(quick).snapshot())
    mode, snapshot = warm_start(slow, 0.0), make_maintenance(slow).snapshot()
    mode.iterate(snapshot)
    assert batches.published_steps(slow) == []
    for _ in range(7):
        mode.iterate(snapshot)
    mode = warm_start(slow, 0.0)
    for _ in range(4 * STEPS):
        mode.iterate(snapshot)
    assert published(slow) == published(quick)


def test_a_warm_start_that_fell_behind_leaves(run):
    behind = warm_start(run)
    warm_start(run).iterate(make_maintenance(run).snapshot())
    with pytest.raises(LostRace):
        behind.iterate(make_maintenance(run).snapshot())


def test_a_demonstration_is_cut_at_a_turn_or_left_out_and_counted(run):
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 0, 1])
    assert [sft.fitting_length(mask, n) for n in (2, 3, 6, 7, 8, 9, 20)] == [0, 3, 3, 7, 7, 9, 9]
    turns = [Message(role="user", content="ab"), Message(role="assistant", content="cd")] * 3
    conversations, fates = [turns, [Message(role="user", content="u" * 9)], turns[:2]], Counter()
    made = list(sft.from_conversations(conversations, encode, 8, fates))
    assert [len(s) for s in made if s] == [8, 4]
    assert fates == {"sft/cut": 1, "sft/dropped": 1}


# the loop


def coordinator(run, mode, clock=None, supervision=None, **desired):
    desired = {"learner": 1, **desired}
    return Coordinator(run, make_maintenance(run, clock), mode, POLL_S, desired, supervision)


def test_a_coordinator_works_to_the_end_and_says_so(run):
    made = coordinator(run, lambda: training(run), time.monotonic)
    others = threading.Thread(
        target=lambda: [(work(run), learn(run)) for _ in iter(run.finished.exists, True)]
    )
    others.start()
    made.work()
    others.join(DEADLINE_S)
    assert run.finished.exists()
    assert list(run.tensorboard.iterdir())
    assert atomic.get(run.status, StatusReport).step == STEPS


@pytest.mark.parametrize("order", ["drain", "stop", "finished"])
def test_a_coordinator_obeys_orders_before_it_does_anything(run, order):
    getattr(run, order).touch()
    coordinator(run, lambda: training(run)).work()
    assert not Spool(run.requests, RolloutRequest).addresses("ready")
    assert run.finished.exists() == (order == "finished")


def test_after_a_drain_engines_are_listed_until_rollout_workers_end(run):
    """Their episodes wait for engines that are not far behind the newest weights."""
    worker = show(run, "rollout-1-00000001", state="draining")
    serves = {"role": "inference", "state": "ready", "url": "http://h"}
    show(run, "inference-1-00000001", versions=[WeightVersion()], **serves)
    run.drain.touch()
    kept = make_maintenance(run, time.monotonic, beats=1000)
    thread = threading.Thread(target=Coordinator(run, kept, None, POLL_S, {"learner": 1}, None).work)
    thread.start()
    until(lambda: _listed(run) == [WeightVersion()])
    later = WeightVersion(incarnation=1, step=1)
    show(run, "inference-1-00000001", beat=2, versions=[later], **serves)
    until(lambda: _listed(run) == [later])
    assert thread.is_alive()
    run.node(worker.owner).unlink()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def _listed(run):
    if run.endpoints.exists():
        return [v for each in atomic.get(run.endpoints, EndpointTable).endpoints for v in each.versions]
    return None


class Refused:
    """A file system that is full for two rounds."""

    made = 0

    def __init__(self):
        Refused.made += 1

    def iterate(self, snapshot):
        if Refused.made < 3:
            raise StorageError("full")
        return Progress("", 0, {}, [])


def test_a_refusal_of_the_file_system_is_a_restart_of_the_work(run):
    coordinator(run, Refused).work()
    assert Refused.made == 3
    assert run.finished.exists()


@pytest.mark.parametrize("stuck_s", [0.0, 300.0])
def test_nothing_moving_among_the_living_is_an_error_that_says_for_what(run, stuck_s):
    """Supervision, if there is any, gets the time to restart what is stuck."""
    clock = Clock()
    limits = GroupsConfig(group_size=2, groups_per_step=2)
    by_role = dict.fromkeys(get_args(Role), stuck_s) if stuck_s else {}
    lease = Lease(run, "coordinator", "x", 1.0)
    supervision = Supervision(lease, run, by_role, 3, ("rollout",), STEPS, beat_s=1.0)
    made = coordinator(run, lambda: training(run, limits), clock, supervision)
    made.iterate()
    clock.now += 200.0
    assert made.iterate() is False  # nobody lives: only time can tell
    show(run, "rollout-1-00000001")
    clock.now += 0.6 * WAIT_S + stuck_s
    assert made.iterate() is False
    clock.now += 0.6 * WAIT_S
    with pytest.raises(DeadlineError, match="results of train-000000-00.*alive: rollout-1-00000001"):
        made.iterate()


@pytest.mark.parametrize(
    ("exported", "step", "counts"),
    [(0, 0, {}), (STEPS + 1, STEPS, {}), (0, 0, {"inference": 0})],
    ids=["at first", "before the last checkpoint", "hybrid: engines run in its job"],
)
def test_a_learner_that_waits_in_the_queue_for_hours_is_awaited(run, exported, step, counts):
    """Others are alive, but have nothing to do."""
    clock = Clock()
    made = coordinator(run, lambda: training(run), clock, **counts)
    for beat in range(20):
        show(run, "rollout-1-00000001", beat)
        clock.now += 50.0
        assert made.iterate() is False
        work(run)
        if exported:  # then its job ended, before it had saved
            learn(run, steps=exported)
    assert atomic.get(run.status, StatusReport).waits_for == f"the learner: step {step} of 3"
