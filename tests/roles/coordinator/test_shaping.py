"""What shaping takes from an advantage, and that rewards alone decide about a group and its scale."""

import pytest
from msgspec.structs import replace

from hpc_swe.base.records import RolloutRequest, Sampling, ScoredEpisode
from hpc_swe.config.settings import BatchesConfig, GroupsConfig, ShapingConfig
from hpc_swe.models.advantages.base import Advantage
from hpc_swe.models.advantages.grpo import Grpo
from hpc_swe.models.advantages.max_rl import MaxRl
from hpc_swe.models.advantages.rloo import Rloo
from hpc_swe.models.advantages.shuffled import Shuffled
from hpc_swe.roles.coordinator.batching import batches
from hpc_swe.roles.coordinator.batching.batches import BatchSettings
from hpc_swe.roles.coordinator.batching.groups import Group, Member
from hpc_swe.roles.coordinator.batching.shaping import overlong, penalty
from tests.kit.coordinator_kit import result

SOFT = ShapingConfig(overlong_from=100, overlong_to=200, overlong_penalty=2.0)


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (100, 0.0), (101, 0.02), (150, 1.0), (200, 2.0), (9999, 2.0)]
)
def test_the_penalty_of_length_grows_linearly_between_its_bounds(tokens, penalty):
    assert overlong(tokens, SOFT) == pytest.approx(penalty)
    assert overlong(tokens, ShapingConfig()) == 0.0


def episode(index: int, value: float, turns: int = 1):
    """Of 3 + index sampled tokens in each turn."""
    request = RolloutRequest(group_id=0, index=index, task_id="t", seed=0, sampling=Sampling())
    scored = result(request, value)
    return replace(scored, episode=replace(scored.episode, turns=scored.episode.turns * turns))


def test_turns_cost_those_that_resolved_and_no_others():
    config = ShapingConfig(turn_penalty=0.25)
    assert penalty(episode(0, 1.0, turns=2), config) == 0.5
    assert penalty(episode(0, 0.0), config) == 0.0, "else giving up first would be best of all failures"


def test_a_reply_that_did_not_arrive_costs_nothing():
    config = ShapingConfig(turn_penalty=0.25, overlong_from=3, overlong_to=4)
    scored = episode(0, 1.0)
    lost = replace(scored.episode.turns[0], delivered=False)
    turns = [lost, *scored.episode.turns]
    assert penalty(replace(scored, episode=replace(scored.episode, turns=turns)), config) == 0.25


GRPO = Grpo()


def decide(shaping: ShapingConfig, *scored: ScoredEpisode, estimator: Advantage = GRPO, resample=True):
    members = [Member(each.episode.request, 0.0, each, state="done") for each in scored]
    limits = GroupsConfig(resample=resample)
    settings = BatchSettings(limits, BatchesConfig(), estimator, 1, shaping)
    return batches.decide(Group(("train", 0), members), 0, settings)


def advantages(*arguments, **options) -> list[float]:
    return [c.advantage for c in decide(*arguments, **options, resample=False).episodes]


SLOW = [episode(index, 1.0, turns=3) for index in range(7)] + [episode(7, 1.0, turns=4)]
LOST = SLOW[:7] + [episode(7, 0.0)]
TURNS = ShapingConfig(turn_penalty=0.02)
LENGTH = ShapingConfig(overlong_from=3, overlong_to=13, overlong_penalty=0.01)


def test_penalties_are_taken_from_advantages():
    assert advantages(ShapingConfig(), episode(0, 1.0), episode(1, 0.0)) == [0.5, -0.5]
    assert advantages(ShapingConfig(turn_penalty=0.5), episode(0, 1.0), episode(1, 0.0)) == [0.25, -0.25]
    assert advantages(LENGTH, episode(0, 0.0), episode(5, 0.0)) == pytest.approx([0.0025, -0.0025])


@pytest.mark.parametrize("estimator", [Grpo(), Grpo(scale_by_std=True), Rloo(), MaxRl()])
def test_no_estimator_divides_a_penalty(estimator):
    """One more turn counts as much as the key says, and not as much as a failure."""
    assert advantages(TURNS, *SLOW, estimator=estimator) == pytest.approx([0.0025] * 7 + [-0.0175])
    plain = advantages(ShapingConfig(), *LOST, estimator=estimator)
    expected = [value - 0.0075 for value in plain[:7]] + [plain[7] + 0.0525]
    assert advantages(TURNS, *LOST, estimator=estimator) == pytest.approx(expected)
    length = advantages(LENGTH, episode(0, 1.0), episode(1, 1.0), estimator=estimator)
    assert length == pytest.approx([0.0005, -0.0005])


@pytest.mark.parametrize("shaping", [TURNS, LENGTH])
def test_a_group_is_selected_by_its_rewards_alone(shaping):
    assert decide(shaping, *SLOW).status == "no_signal"
    assert not decide(shaping, *SLOW, resample=False).has_signal
    assert decide(shaping, *LOST).has_signal
    half = [episode(index, value) for index, value in enumerate((0.0, 0.5, 1.0))]
    assert decide(shaping, *half).status == "trained", "the middle one has no advantage by its reward"


def test_the_control_shuffles_penalties_with_their_rewards():
    dealt = advantages(TURNS, *LOST, estimator=Shuffled())
    assert dealt != advantages(TURNS, *LOST)
    assert sorted(dealt) == pytest.approx(sorted(advantages(TURNS, *LOST)))
