"""What shaping takes from a reward, and that it changes advantages alone."""

import pytest
from msgspec.structs import replace

from hpc_swe.plugins.advantages.grpo import Grpo
from hpc_swe.records import RolloutRequest, Sampling
from hpc_swe.roles.coordinator import batches
from hpc_swe.roles.coordinator.batches import BatchSettings
from hpc_swe.roles.coordinator.groups import Group, Member
from hpc_swe.roles.coordinator.shaping import overlong, shaped
from hpc_swe.settings import BatchesConfig, GroupsConfig, ShapingConfig
from tests.kit.coordinator_kit import result

SOFT = ShapingConfig(overlong_from=100, overlong_to=200, overlong_penalty=2.0)


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (100, 0.0), (101, 0.02), (150, 1.0), (200, 2.0), (9999, 2.0)]
)
def test_the_penalty_of_length_grows_linearly_between_its_bounds(tokens, penalty):
    assert overlong(tokens, SOFT) == pytest.approx(penalty)
    assert overlong(tokens, ShapingConfig()) == 0.0


def episode(index: int, value: float):
    """Of 3 + index sampled tokens and one turn."""
    request = RolloutRequest(group_id=0, index=index, task_id="t", seed=0, sampling=Sampling())
    return result(request, value)


def test_turns_cost_those_that_resolved_and_no_others():
    config = ShapingConfig(turn_penalty=0.25)
    assert shaped(episode(0, 1.0), config) == 0.75
    assert shaped(episode(0, 0.0), config) == 0.0, "else giving up first would be best of all failures"


def test_a_reply_that_did_not_arrive_costs_nothing():
    config = ShapingConfig(turn_penalty=0.25, overlong_from=3, overlong_to=4)
    scored = episode(0, 1.0)
    lost = replace(scored.episode.turns[0], delivered=False)
    assert (
        shaped(replace(scored, episode=replace(scored.episode, turns=[lost, *scored.episode.turns])), config)
        == 0.75
    )


def advantages(shaping: ShapingConfig, *values: float) -> list[float]:
    members = [
        Member(scored.episode.request, 0.0, scored, state="done")
        for scored in (episode(index, value) for index, value in enumerate(values))
    ]
    limits = replace(GroupsConfig(), resample=False)
    settings = BatchSettings(limits, BatchesConfig(), Grpo(), 1, shaping)
    return [c.advantage for c in batches.decide(Group(("train", 0), members), 0, settings).episodes]


def test_advantages_come_from_shaped_rewards():
    assert advantages(ShapingConfig(), 1.0, 0.0) == [0.5, -0.5]
    assert advantages(ShapingConfig(overlong_from=3, overlong_to=4), 0.0, 0.0) == [0.5, -0.5]
    assert advantages(ShapingConfig(turn_penalty=0.5), 1.0, 0.0) == [0.25, -0.25]
