from dataclasses import replace

import msgspec
import pytest

from hpc_swe.base.records import CoordinatorState, ExitStatus, Sampling, Score, ScoredEpisode
from hpc_swe.base.store.spool import Address
from hpc_swe.config.settings import BatchesConfig, GroupsConfig
from hpc_swe.models.advantages.grpo import Grpo
from hpc_swe.roles.coordinator.batching.batch_metrics import of_batch
from hpc_swe.roles.coordinator.batching.batches import (
    BatchPlan,
    BatchSettings,
    GroupDecision,
    build_batches,
    decide,
    plan_batch,
)
from hpc_swe.roles.coordinator.batching.groups import Group, Ledger, Member, parse_name
from hpc_swe.roles.coordinator.dispatch import RequestPlan
from tests.kit.made_episodes import array, episode, scored, turn

KEY = ("train", 0)
PLAN = RequestPlan(1, 3, Sampling())


def new_ledger(attempts=3, now=0.0):
    made = Ledger(attempts)
    made.open(KEY, PLAN.group(0, "t"), now)
    return made


def take(ledger, result, now=1.0):
    return ledger.record(Address(result.episode.request.name, 0), result, now)


def batch_settings(advantage=None, data_parallel=1, groups=None, **batches):
    limits = GroupsConfig(group_size=3, groups_per_step=2, **(groups or {}))
    return BatchSettings(limits, BatchesConfig(**batches), advantage or Grpo(), data_parallel)


def group(*results, number=0):
    members = [Member(r.episode.request, 0.0, r, None, "done") for r in results]
    return Group(("train", number), members)


# the ledger


def test_the_first_result_wins_and_the_rest_are_duplicates():
    ledger = new_ledger()
    take(ledger, scored(1.0))
    assert take(ledger, scored(0.0)) == "drop"
    assert ledger.groups[KEY].results[0].score.reward == 1.0
    assert ledger.counts["episodes/duplicates"] == 1


def test_an_infrastructure_failure_is_asked_for_again_and_at_last_given_up():
    ledger = new_ledger(attempts=3)
    for attempt in (0, 1):
        assert take(ledger, scored(None, attempt=attempt)) == "retry"
        assert ledger.groups[KEY].members[0].request.attempt == attempt + 1
    assert take(ledger, scored(None, attempt=2)) == "keep"
    take(ledger, scored(1.0, index=1))
    take(ledger, scored(0.0, index=2))
    assert not ledger.groups[KEY].is_open
    assert len(ledger.groups[KEY].results) == 2
    assert ledger.counts["episodes/infra"] == 3


def test_a_late_failure_of_an_attempt_made_again_costs_no_attempt():
    ledger = new_ledger()
    take(ledger, scored(None, attempt=0))
    assert take(ledger, scored(None, attempt=0)) == "drop"
    assert ledger.groups[KEY].members[0].request.attempt == 1


def test_the_count_of_attempts_survives_a_restart_in_the_record():
    ledger = new_ledger(attempts=3)  # a new coordinator: it believes in attempt 0
    assert take(ledger, scored(None, attempt=1)) == "retry"
    assert ledger.groups[KEY].members[0].request.attempt == 2


def test_a_result_after_the_last_failure_still_counts():
    ledger = new_ledger(attempts=1)
    assert take(ledger, scored(None)) == "keep"
    assert take(ledger, scored(1.0)) == "keep"
    assert len(ledger.groups[KEY].results) == 1


def test_tokens_that_cannot_be_trusted_are_an_infrastructure_failure():
    broken = scored(1.0)
    one = msgspec.structs.replace(broken.episode.turns[0], spans=[])
    broken = msgspec.structs.replace(broken, episode=msgspec.structs.replace(broken.episode, turns=[one]))
    assert take(new_ledger(), broken) == "retry"


def test_a_member_found_nowhere_for_long_is_asked_for_again():
    """NFS shows for up to a minute that what a worker has just claimed is neither ready nor claimed."""
    ledger = new_ledger()
    names = {m.request.name for m in ledger.groups[KEY].members}
    lost = "train-000000-01"
    assert ledger.find_lost(names, 0.0, 90.0) == []
    for now in (10.0, 11.0, 12.0, 99.0):
        assert ledger.find_lost(names - {lost}, now, 90.0) == []
    assert [r.name for r in ledger.find_lost(names - {lost}, 100.0, 90.0)] == [lost]
    assert ledger.find_lost(names - {lost}, 101.0, 90.0) == []  # it has just been asked for
    ledger.find_lost(names, 150.0, 90.0)
    assert ledger.find_lost(names - {lost}, 200.0, 90.0) == []  # seen meanwhile


@pytest.mark.parametrize(
    ("worked_s", "is_open"),
    [
        ({}, True),  # nobody has taken them yet
        ({"train-000000-01": 1e9}, True),  # one waits for a worker, or to be graded
        ({"train-000000-01": 1e9, "train-000000-02": 100.0}, True),
        ({"train-000000-01": 1e9, "train-000000-02": 100.1}, False),
        ({"train-000000-00": 1e9}, True),  # a second worker is at what came long ago
    ],
)
def test_a_group_is_closed_by_the_clocks_of_all_its_open_members(worked_s, is_open):
    ledger = new_ledger(now=0.0)
    take(ledger, scored(index=0))
    ledger.close_stragglers(worked_s, 100.0)
    assert ledger.groups[KEY].is_open == is_open
    assert ledger.counts["groups/straggled"] == (not is_open)
    if not is_open:
        assert ledger.find_lost(set(), 1e9, 0.0) == []  # no longer asked for


def test_names_of_large_runs_are_found_again():
    request = msgspec.structs.replace(PLAN.group(0, "t")[0], split="eval", group_id=12_345_678, index=123)
    assert parse_name(request.name) == (("eval", 12_345_678), 123)


# judging


def truncated(reward, index):
    return scored(reward, index=index, status=ExitStatus.CONTEXT)


def test_a_group_needs_two_members():
    assert decide(group(scored(1.0)), 0, batch_settings()).status == "too_few"
    assert decide(group(scored(1.0), scored(0.0, index=1)), 0, batch_settings()).status == "trained"


@pytest.mark.parametrize(
    ("overlong", "advantages"),
    [("train", [2 / 3, -1 / 3, -1 / 3]), ("mask_loss", [2 / 3, -1 / 3]), ("drop_from_baseline", [0.5, -0.5])],
)
def test_what_a_truncated_episode_counts_for(overlong, advantages):
    decision = decide(
        group(scored(1.0), scored(0.0, index=1), truncated(0.0, 2)), 0, batch_settings(overlong=overlong)
    )
    assert [c.advantage for c in decision.episodes] == pytest.approx(advantages)


@pytest.mark.parametrize("overlong", ["mask_loss", "drop_from_baseline"])
def test_who_waits_until_its_time_is_over_is_trained_all_the_same(overlong):
    late = scored(0.0, index=1, status=ExitStatus.TOOL_TIME)
    decision = decide(group(scored(1.0), late), 0, batch_settings(overlong=overlong))
    assert [c.advantage for c in decision.episodes] == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize("overlong", ["mask_loss", "drop_from_baseline"])
def test_signal_is_judged_after_masking(overlong):
    """The only success was cut off: nothing that may be trained tells the members apart."""
    members = group(truncated(1.0, 0), scored(0.0, index=1), scored(0.0, index=2))
    status = decide(members, 0, batch_settings(overlong=overlong)).status
    assert status == ("no_signal" if overlong == "drop_from_baseline" else "trained")
    lonely = group(truncated(1.0, 0), truncated(0.0, 1), scored(0.5, index=2))
    assert decide(lonely, 0, batch_settings(overlong="mask_loss")).status == "no_signal"


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_group_with_a_token_over_the_limit_is_dropped(limit):
    members = group(scored(1.0, step=1), scored(0.0, index=1, step=9))
    how = batch_settings(groups={"max_staleness": limit})
    assert decide(members, 1 + limit, how).status == "trained"
    assert decide(members, 2 + limit, how).status == "too_old"


def test_groups_dropped_for_their_age_do_not_count_in_the_rate_of_signal():
    """Else a surplus of groups with signal looks like a lack of them, and the next surplus is larger."""
    signals = {g: GroupDecision("too_old" if g % 2 else "trained", []) for g in range(400)}
    state = CoordinatorState()
    for step in range(20):
        state = plan_batch(signals.get, state, step, 2).after
    assert state.signal_rate == 1.0


def test_one_old_turn_among_new_ones_drops_the_group():
    mixed = episode([turn(None, [1], [10], step=1), turn(0, [2], [11, 12], step=9)])
    members = group(
        ScoredEpisode(episode=mixed, score=Score(outcome="resolved", reward=1.0)),
        scored(0.0, index=1, step=9),
    )
    assert decide(members, 10, batch_settings(groups={"max_staleness": 8})).status == "too_old"
    assert decide(members, 9, batch_settings(groups={"max_staleness": 8})).status == "trained"


def test_curves_show_when_long_episodes_are_dropped_or_masked():
    short = [scored(1.0, step=1), scored(0.0, index=1, length=5, step=1)]
    masked = scored(0.0, index=2, length=90, step=1, status=ExitStatus.CONTEXT)
    old = [scored(1.0, 1, length=20), scored(0.0, 1, index=1, length=40)]
    groups = [group(*short, masked), group(*old, number=1)]
    how = batch_settings(overlong="mask_loss", groups={"max_staleness": 0})
    decisions = {number: decide(each, 1, how) for number, each in enumerate(groups)}
    values = of_batch(groups, BatchPlan(1, [0], [1], decisions, CoordinatorState()))
    lengths = {kind: values[f"episodes/{kind}"] for kind in ("finished", "trained_tokens", "dropped_tokens")}
    assert lengths == {"finished": 5.0, "trained_tokens": 4.0, "dropped_tokens": 30.0}


# composing


def decided(decisions):
    return lambda number: GroupDecision(decisions[number], []) if decisions.get(number) else None


TRAINED, EMPTY = "trained", "no_signal"


def test_the_signal_rate_follows_what_was_seen():
    decisions = {g: TRAINED if g % 4 == 3 else EMPTY for g in range(400)}
    state = CoordinatorState()
    for step in range(20):
        state = plan_batch(decided(decisions), state, step, 2).after
    assert state.signal_rate == pytest.approx(0.25, abs=0.02)


def test_optimizer_steps_share_the_episodes_and_not_the_microbatches():
    """All six episodes fit one microbatch; two of them train nothing."""
    members = [group(scored(1.0), scored(0.0, index=1), truncated(0.0, 2), number=n) for n in range(2)]
    how = batch_settings(overlong="mask_loss")
    made = [decide(each, 0, how) for each in members]
    batch_plan = plan_batch(lambda number: made[number], CoordinatorState(), 0, 2)
    for wanted, sizes in ((1, []), (2, [1, 1]), (9, [1, 1, 1, 1])):
        (batch,) = build_batches(batch_plan, replace(how, minibatches=wanted))
        assert (batch.minibatches, len(batch.microbatches)) == (sizes, max(1, len(sizes)))


def test_an_episode_of_two_samples_is_one_episode_in_the_mean():
    forked = episode([turn(None, [1], [10]), turn(None, [2], [11, 12])], index=1)
    forked = ScoredEpisode(episode=forked, score=Score(outcome="unresolved", reward=0.0))
    how = batch_settings(aggregate="seq_mean_token_mean", train_chains="all", groups={"max_staleness": 1})
    one = group(scored(1.0, length=3), forked)
    two = group(scored(1.0, group=1), scored(0.0, group=1, index=1), number=1)
    made = plan_batch(lambda g: decide((one, two)[g], 0, how), CoordinatorState(), 0, 2)
    (batch,) = build_batches(made, how)
    weights = {round(float(w), 6) for m in batch.microbatches for w in array(m.weights) if w}
    assert weights == {round(1 / 12, 6)}  # four episodes of three tokens each
