import random
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hpc_swe.base.records import BatchManifest, Sampling, ScoredEpisode
from hpc_swe.base.store import folders, task_history
from hpc_swe.base.store.spool import Spool
from hpc_swe.base.store.task_history import RunHistory
from hpc_swe.config.settings import CurriculumConfig
from hpc_swe.roles.coordinator.batching.groups import Group, Member
from hpc_swe.roles.coordinator.curriculum import TaskPlan, WeightedTasks, visits
from hpc_swe.roles.coordinator.dispatch import RequestPlan
from tests.kit.constants import varied
from tests.kit.coordinator_kit import (
    ALIKE,
    TASKS,
    finish,
    learn,
    make_maintenance,
    published,
    result,
    reward,
    rundir,
    training,
    work,
)

REQUESTS = RequestPlan(3, 2, Sampling())
SEVEN = WeightedTasks("", tuple(f"task-{i}" for i in range(7)))
TWO = (WeightedTasks("easy", ("e1", "e2", "e3"), 3.0), WeightedTasks("hard", ("h1", "h2"), 1.0))
AT_ONCE = varied(CurriculumConfig, settled_after=1)
REST = AT_ONCE(rest=2)


def planned(config=ALIKE, sources=(SEVEN,), history=None):
    return TaskPlan(REQUESTS, sources, config, history or RunHistory())


def task(plan, number):
    return plan.requests(number)[0].task_id


def closed(plan, number, solved):
    """A group of two members with these outcomes."""
    members = [
        Member(request, 0.0, result(request, float(value)), state="done")
        for request, value in zip(plan.requests(number), solved, strict=True)
    ]
    return Group(("train", number), members)


def test_every_pass_takes_every_task_once_in_its_own_order():
    plan = planned()
    passes = [[task(plan, 7 * epoch + i) for i in range(7)] for epoch in range(3)]
    assert all(sorted(tasks) == sorted(SEVEN.tasks) for tasks in passes)
    assert len({tuple(tasks) for tasks in passes}) == 3


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6), st.integers(1, 500))
def test_visits_of_the_parts_follow_their_weights_at_any_time(weights, number):
    sources = [WeightedTasks(str(i), (f"{i}-a", f"{i}-b", f"{i}-c"), w) for i, w in enumerate(weights)]
    counts = Counter(task.partition("-")[0] for task in islice(visits(0, sources), number))
    for source in sources:
        assert abs(counts[source.name] - number * source.weight / sum(weights)) < len(sources)


def test_a_settled_task_is_passed_over_and_then_visited_again():
    plan, rested = planned(REST, [WeightedTasks("", ("a", "b"))]), []
    for number in range(12):
        name = task(plan, number)
        rested.append(name)
        plan.consume([closed(plan, number, (1, 0) if name == "a" else (0, 0))], number + 1)
    assert Counter(rested) == {"a": 9, "b": 3}, "b has one visit in three"


def test_when_every_task_is_settled_all_are_visited_alike():
    plan = planned(REST, [WeightedTasks("", ("a", "b"))])
    counts = Counter[str]()
    for number in range(20):
        counts[task(plan, number)] += 1
        plan.consume([closed(plan, number, (1, 1))], number + 1)
    assert counts == {"a": 10, "b": 10}


def test_a_task_that_gives_signal_again_is_settled_no_longer():
    plan = planned(REST, [WeightedTasks("", ("a",))])
    history = plan.consume([closed(plan, 0, (0, 0))], 1)
    assert plan.is_settled("a")
    assert history.tasks["a"].settled == 1
    history = plan.consume([closed(plan, 1, (0, 1))], 2)
    assert not plan.is_settled("a")
    assert (history.tasks["a"].groups, history.tasks["a"].episodes, history.tasks["a"].resolved) == (2, 4, 1)


@given(st.integers(0, 999), st.integers(0, 3), st.integers(1, 3))
def test_a_coordinator_that_starts_anywhere_plans_the_same_groups(seed, rest, settled_after):
    """Plan ahead by random amounts, consume random numbers of groups, and start again from each history."""
    draw, config = random.Random(seed), varied(CurriculumConfig, settled_after=settled_after)(rest=rest)
    plan, first, seen = planned(config, TWO), 0, {}
    for _ in range(8):
        ahead = first + draw.randint(1, 9)
        seen |= {number: task(plan, number) for number in range(first, ahead)}
        last = draw.randint(first + 1, ahead)
        groups = [closed(plan, n, (draw.random() < 0.3, draw.random() < 0.3)) for n in range(first, last)]
        history = plan.consume(groups, last)
        successor = planned(config, TWO, history)
        for number in range(last, last + 15):
            found = task(successor, number)
            assert found == seen.get(number, found), "a group may have been dispatched before the batch"
        assert successor.settled_share == plan.settled_share
        plan, first = planned(config, TWO, history) if draw.random() < 0.5 else plan, last
        seen = {number: value for number, value in seen.items() if number >= last}


def test_a_group_without_results_says_nothing_about_its_task():
    assert planned(REST).consume([Group(("train", 0), [])], 1).tasks == {}


def test_one_episode_does_not_settle_its_task():
    plan = planned(REST, [WeightedTasks("", ("a",))])
    one = closed(plan, 0, (0, 0))
    one.members[1].state = "failed"
    history = plan.consume([one], 1)
    assert not plan.is_settled("a")
    assert (history.tasks["a"].groups, history.tasks["a"].episodes) == (1, 1)


def manifest(run, step):
    return folders.manifest(run.batch(step), BatchManifest)


@pytest.fixture(scope="module")
def options():
    parts = (WeightedTasks("even", TASKS[::2], 2.0), WeightedTasks("odd", TASKS[1::2], 1.0))
    return {"steps": 6, "sources": parts, "curriculum": AT_ONCE(rest=1)}


def test_a_coordinator_restarted_at_every_round_publishes_the_same_mixture(tmp_path, options):
    finish(calm := rundir(tmp_path / "calm"), **options)
    run = rundir(tmp_path / "restarted")
    maintenance = make_maintenance(run)
    for _ in range(200):
        if not training(run, **options).iterate(maintenance.snapshot()).waits_for:
            break
        work(run)
        learn(run, options["steps"])
    assert published(run) == published(calm)
    last = manifest(run, 5)
    history = task_history.read(run, last.step, last.after.next_group)
    assert sum(known.groups for known in history.tasks.values()) == last.after.next_group
    assert history.visits > last.after.next_group, "some visits were passed over"


@pytest.mark.parametrize("change", [{"task_id": "another"}, {"sampling": Sampling(temperature=0.5)}])
def test_a_result_of_another_request_than_planned_is_not_taken(run, change):
    mode = training(run)
    mode.iterate(make_maintenance(run).snapshot())
    (name, *_), scored = (
        work(run, keep=lambda name: name == "train-000000-00"),
        Spool(run.scored, ScoredEpisode),
    )
    (address,) = scored.addresses("ready")
    right = scored.read(address)
    wrong = result(replace(right.episode.request, **change), reward(name))
    scored.overwrite(name, wrong)
    mode.iterate(make_maintenance(run).snapshot())
    assert mode._ledger.member(name).state == "open"
    assert list(scored.addresses("ready")) == []
