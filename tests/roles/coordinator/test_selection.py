"""The best weights are kept, and a run that gets no better ends."""

import pytest
from msgspec.structs import replace

from hpc_swe.base.store import atomic, weights
from hpc_swe.base.store.stop_signs import SignRecord
from hpc_swe.roles.coordinator.batching import batches
from hpc_swe.roles.coordinator.modes.evaluation import due
from hpc_swe.roles.coordinator.selection import EvalRate, select, steps_of
from tests.kit.coordinator_kit import HELD_OUT, KEPT, learn, make_maintenance, reward, rundir, training, work


@pytest.mark.parametrize(
    ("rates", "best", "since"),
    [
        ({0: 0.2}, 0, 0),
        ({0: 0.2, 5: 0.4, 10: 0.3}, 5, 1),
        ({10: 0.4, 0: 0.4, 5: 0.4}, 0, 2),  # no better than the first
        ({0: 0.0, 5: 0.0, 10: 0.1}, 10, 0),
    ],
)
def test_the_first_of_the_highest_is_best(rates, best, since):
    found = select({step: EvalRate(rate) for step, rate in rates.items()})
    assert (found.step, found.rate, found.rounds_since) == (best, rates[best], since)
    assert select({}) is None


@pytest.mark.parametrize(
    ("newest", "every", "export_every", "step"),
    [
        (0, 5, 1, 0),
        (10, 5, 1, 10),
        (12, 5, 1, None),  # the round of step 10 did not begin with weights 10, so it is left out
        (12, 6, 3, 12),
        (15, 6, 3, None),
        (12, 10, 4, 10),  # a run of before the rule: the first exported weights from step 10 on
        (16, 10, 4, None),
        (7, 0, 1, 0),
    ],
)
def test_a_round_begins_with_the_weights_of_its_step_or_not(newest, every, export_every, step):
    assert due(newest, every, export_every) == step


def test_a_slow_evaluation_keeps_the_weights_of_one_round_and_no_more(run):
    """Of 20 rounds, those that are due meanwhile are left out, and nobody waits for their weights."""
    maintenance = make_maintenance(run, retention=KEPT)
    mode = training(run, **OPTIONS)
    for _ in range(20):
        snapshot = maintenance.snapshot()
        progress = mode.iterate(snapshot)
        assert progress.kept_steps == {0}
        maintenance._done.pop("retain", None)
        maintenance.clean_up(snapshot, progress.kept_steps)
        work(run, keep=lambda name: name.startswith("train"))
        learn(run, STEPS)
    assert len(weights.published(run)) == 3
    for _ in range(4):
        work(run, keep=lambda name: name.startswith("eval"))
        mode.iterate(maintenance.snapshot())
    assert {step for step in mode._evaluator._rates if step} <= {weights.newest(run).step}


@pytest.mark.parametrize(
    ("failed", "since"),
    [
        ((0.0, 0.3, 0.1), 1),  # the outage of step 5 says nothing about its weights
        ((0.0, 0.3, 0.2), 0),
        ((0.3, 0.3, 0.3), 2),  # a task that fails in every evaluation makes no difference
    ],
)
def test_an_evaluation_that_an_outage_spoiled_counts_for_no_end(failed, since):
    rates = [EvalRate(solved, lost) for solved, lost in zip((0.4, 0.3, 0.25), failed, strict=True)]
    assert select(dict(zip((0, 5, 10), rates, strict=True))).rounds_since == since


def test_results_of_a_round_are_not_those_of_another_when_every_changes(run):
    """The round of step 2 is under way when `eval.every` becomes 3; the coordinator starts again."""
    maintenance, mode = make_maintenance(run), training(run, **OPTIONS | {"every": 2})
    for _ in range(30):
        mode.iterate(maintenance.snapshot())
        step = weights.newest(run).step if weights.published(run) else 0
        work(run, keep=lambda name, step=step: name.startswith("train") or step < 2)
        if step == 2 and any(key[0] == "eval" for key in mode._ledger.groups):
            break
        learn(run, STEPS)
    mode = training(run, **OPTIONS | {"every": 3})
    for _ in range(4):
        mode.iterate(maintenance.snapshot())
        work(run, keep=lambda name: name.startswith("eval"))
    assert mode._evaluator._rates.keys() == {0}, "no round of step 3 was made of answers of weights 2"


def judge(best: int):
    """Held-out tasks are resolved in the round of step `best` alone, training ones now and then."""

    def judged(name: str) -> float:
        split, group, _ = name.split("-")
        return float(int(group) // 2 == best) if split == "eval" else reward(name)

    return judged


STEPS = 24
OPTIONS = {"every": 1, "eval_tasks": ("x", "y"), "steps": STEPS}


def train(run, patience, best):
    maintenance = make_maintenance(run, retention=KEPT)
    mode = training(run, **OPTIONS)
    mode._evaluator.config = replace(HELD_OUT, patience=patience)
    for _ in range(300):
        snapshot = maintenance.snapshot()
        progress = mode.iterate(snapshot)
        maintenance._done.pop("retain", None)
        maintenance.clean_up(snapshot, progress.kept_steps)
        if not progress.waits_for:
            return mode
        work(run, judge=judge(best))
        learn(run, STEPS)
    raise AssertionError("not done")


def test_a_sign_that_the_learner_saw_ends_the_run_after_what_is_published(run):
    maintenance, mode = make_maintenance(run), training(run, steps=STEPS)
    for _ in range(60):
        progress = mode.iterate(maintenance.snapshot())
        if not progress.waits_for:
            break
        if weights.published(run) and weights.newest(run).step == 5:
            atomic.put(run.stop_signs, SignRecord(reason="gap/k3 was above 0.01"))
        if run.stop_signs.exists():
            mode = training(run, steps=STEPS)  # a coordinator that starts now knows it, too
        work(run)
        learn(run, STEPS)
    else:
        raise AssertionError("not done")
    steps = len(batches.published_steps(run))
    assert 5 <= steps <= 7
    assert weights.newest(run).step == steps, "the learner trained what was published"


def test_the_best_weights_outlive_the_newest(run):
    mode = train(run, patience=0, best=1)
    assert len(mode._evaluator._rates) > 4
    assert {version.step for version in weights.published(run)} == {1, STEPS - 1, STEPS}


def test_a_run_that_gets_no_better_ends_and_one_that_does_goes_on(tmp_path):
    patient, hasty = rundir(tmp_path / "patient"), rundir(tmp_path / "hasty")
    train(patient, patience=0, best=0)
    assert len(batches.published_steps(patient)) == STEPS
    mode = train(hasty, patience=3, best=0)
    assert len(mode._evaluator._rates) == 4, "three rounds after the best one"
    steps = batches.published_steps(hasty)
    assert len(steps) < STEPS
    assert weights.newest(hasty).step == len(steps), "the learner trained what was published"


def test_only_names_of_steps_are_evaluations_of_steps():
    assert steps_of(["step_000004", "step_x", "4", "base"]) == {"step_000004": 4}
