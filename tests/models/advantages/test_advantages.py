from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.loader import dump, known, load
from hpc_swe.config import config as configuration
from hpc_swe.models.advantages.grpo import Grpo
from hpc_swe.models.advantages.max_rl import MaxRl
from hpc_swe.models.advantages.rloo import Rloo
from hpc_swe.models.advantages.shuffled import Shuffled
from hpc_swe.tasks.graders.base import RESOLVED
from tests.kit.checkout import ROOT

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=8)


@pytest.mark.parametrize("name", known("advantages"))
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_equal_rewards_are_no_signal(name, reward):
    assert load("advantages", {"type": name})([reward] * 5) == pytest.approx([0.0] * 5, abs=1e-9)


@given(REWARDS)
def test_credit_within_a_group_adds_up_to_nothing(rewards):
    for estimator in (Grpo(), Grpo(scale_by_std=True), Rloo(), MaxRl()):
        assert sum(estimator(rewards)) == pytest.approx(0.0, abs=1e-6)


def test_one_of_two_resolved_gives_the_advantages_that_system_a_had():
    config = configuration.read(ROOT / "configs/swebench.toml")
    rewards = [RESOLVED, config.grader.unresolved_reward]
    assert rewards == [1.0, -1.0]
    assert config.groups.group_size == len(rewards)
    assert config.advantage(rewards) == [1.0, -1.0]


def test_grpo_subtracts_the_mean():
    assert Grpo()([1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]


def test_grpo_divides_by_the_standard_deviation_when_asked():
    assert Grpo(scale_by_std=True)([1, 0]) == pytest.approx([1, -1], abs=1e-5)


@given(REWARDS)
def test_rloo_compares_with_the_siblings(rewards):
    expected = [r - fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert Rloo()(rewards) == pytest.approx(expected, abs=1e-9)


def test_max_rl_counts_a_rare_success_more():
    assert MaxRl()([1, 0, 0, 0]) == [3, -1, -1, -1]
    assert MaxRl()([1, 1, 1, 0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1])


def test_max_rl_refuses_negative_rewards_and_says_what_to_do():
    with pytest.raises(ConfigError, match="grader.unresolved_reward to 0"):
        MaxRl()([1, -1])


def test_the_control_of_a_bounded_estimator_is_bounded_alike():
    assert Shuffled(of={"type": "max_rl"}).lowest_reward == MaxRl().lowest_reward == 0
    assert Shuffled().lowest_reward < -1e9


def test_the_control_deals_the_same_advantages_without_regard_to_reward():
    rewards = [1.0, 0.0]
    control = Shuffled(of={"type": "rloo"})
    dealt = [control.for_group(group)(rewards) for group in range(400)]
    assert all(sorted(advantages) == [-1, 1] for advantages in dealt)
    assert abs(sum(advantages[0] for advantages in dealt)) < 80  # 4 standard deviations
    assert dealt == [control.for_group(group)(rewards) for group in range(400)]


def test_the_control_survives_run_json():
    control = Shuffled(of={"type": "grpo", "scale_by_std": True})
    assert load("advantages", dump(control)) == control
