"""The objectives against numbers worked out by hand, and the curves against what they claim to show."""

import dataclasses
import math
from typing import ClassVar, get_args, get_type_hints

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hpc_swe.base.metrics import meaning  # noqa: E402
from hpc_swe.models.policies.base import LossConfig, TrainedTokens  # noqa: E402
from hpc_swe.roles.learner.loss import PolicyObjective  # noqa: E402

OBJECTIVES = get_args(get_type_hints(LossConfig)["objective"])

PI = [0.5, 0.15, 0.9]
MU = [0.4, 0.20, 0.5]  # ratios 1.25, 0.75, 1.8
ADVANTAGES = [1.0, -1.0, 1.0]
WEIGHTS = [0.5, 0.25, 0.25]


def make(
    pi=PI, mu=MU, advantages=ADVANTAGES, weights=WEIGHTS, reference=None, sequence=None
) -> TrainedTokens:
    logs = [torch.tensor([math.log(p) for p in column]) for column in (pi, mu)]
    return TrainedTokens(
        logprobs=logs[0].requires_grad_(),
        entropy=torch.full((len(pi),), 0.7),
        sampler=logs[1],
        advantages=torch.tensor(advantages),
        weights=torch.tensor(weights),
        reference=torch.tensor([math.log(p) for p in reference]) if reference else None,
        sequence=torch.tensor(sequence or list(range(len(pi))), dtype=torch.int64),
        sequences=max(3, len(pi)),
    )


def loss_and_slope(tokens: TrainedTokens, **config) -> tuple[float, list[float]]:
    """Of the objective alone, unless the square is asked for."""
    loss, _, _ = PolicyObjective(LossConfig(**{"sampler_coefficient": 0.0} | config))(tokens)
    loss.backward()
    return loss.item(), tokens.logprobs.grad.tolist()


def metrics(*batches: TrainedTokens, **config) -> dict[str, float]:
    objective = PolicyObjective(LossConfig(**config))
    parts = [objective(tokens)[1:] for tokens in batches]
    sums = sum(part[0] for part in parts)
    return objective.metrics(sums.tolist(), torch.stack([part[1] for part in parts]).amax(0).tolist())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_square_pulls_tokens_of_all_objectives_back_to_mu(objective):
    """Also those that a clip has stopped, or an advantage of 0; nobody has sampled the tokens of sft."""
    for advantages in (ADVANTAGES, [0.0] * 3):
        alone, pulled = (
            loss_and_slope(make(advantages=advantages), objective=objective, sampler_coefficient=c)
            for c in (0.0, 0.1)
        )
        gaps = [0.0 if objective == "sft" else math.log(p / m) for p, m in zip(PI, MU, strict=True)]
        parts = list(zip(WEIGHTS, gaps, strict=True))
        assert pulled[0] - alone[0] == pytest.approx(0.1 * sum(w * d * d for w, d in parts), abs=1e-6)
        differences = [new - old for new, old in zip(pulled[1], alone[1], strict=True)]
        assert differences == pytest.approx([0.1 * w * 2 * d for w, d in parts], abs=1e-6)


def test_a_run_that_says_nothing_has_the_square_and_its_curve():
    square = sum(math.log(p / m) ** 2 for p, m in zip(PI, MU, strict=True)) / 3
    assert metrics(make())["policy/sampler_square"] == pytest.approx(square)
    loss = PolicyObjective(LossConfig())(make())[0].item()
    assert loss > loss_and_slope(make())[0]
    assert "policy/sampler_square" not in metrics(make(), sampler_coefficient=0.0)
    assert "policy/sampler_square" not in metrics(make(), objective="sft")


SAMPLED = sorted({*OBJECTIVES} - {"sft"})
WIDE = {"clip_low": 1.0, "clip_high": 9.0, "sequence_clip_low": 1.0, "sequence_clip_high": 9.0}


@pytest.mark.parametrize("objective", SAMPLED)
@pytest.mark.parametrize(
    ("masks", "sign", "left_out", "curve"),
    [
        # the probabilities have moved by .1, -.05 and .4
        ({"mask_shift": 0.07}, 1, [True, False, True], "ratio/shifted_share"),
        ({"mask_shift": 0.04}, 1, [True, True, True], "ratio/shifted_share"),
        ({"mask_shift": 0.04}, -1, [False, False, False], "ratio/shifted_share"),  # all of them move back
        # each token is a sequence here: mean log mu - log pi is -.22, .29 and -.59
        ({"mask_sequence": 0.28}, 1, [False, True, False], "ratio/diverged_share"),
        ({"mask_sequence": 0.30}, 1, [False, False, False], "ratio/diverged_share"),
        ({"mask_sequence": 0.28}, -1, [False, False, False], "ratio/diverged_share"),
    ],
)
def test_masks_take_the_objective_of_a_token_and_leave_the_square(objective, masks, sign, left_out, curve):
    def slopes(**more) -> list[float]:
        tokens = make(advantages=[sign * a for a in ADVANTAGES])
        return loss_and_slope(tokens, objective=objective, **WIDE, **more)[1]

    expected = [0.0 if out else slope for slope, out in zip(slopes(), left_out, strict=True)]
    assert slopes(**masks) == pytest.approx(expected)
    pulled = [new - old for new, old in zip(slopes(sampler_coefficient=0.1), slopes(), strict=True)]
    both = [slope + pull for slope, pull in zip(expected, pulled, strict=True)]
    assert slopes(**masks, sampler_coefficient=0.1) == pytest.approx(both)
    tokens = make(advantages=[sign * a for a in ADVANTAGES])
    assert metrics(tokens, objective=objective, **masks)[curve] == pytest.approx(sum(left_out) / 3)


def test_a_sequence_is_masked_as_a_whole_by_its_mean():
    """Means of log mu - log pi: .03 of tokens 0 and 1, -.59 of token 2."""
    tokens = make(advantages=[-1.0, -1.0, -1.0], sequence=[1, 1, 2])
    slope = loss_and_slope(tokens, objective="cispo", mask_sequence=0.02)[1]
    assert slope[:2] == [0.0, 0.0]
    assert slope[2] > 0


def test_sampler_ratio_clips_on_both_sides():
    # 1.25 is inside 0.8 .. 1.28: term -1.25, slope -1.25. 0.75 with A < 0: term 0.8, no slope.
    # 1.8 with A > 0: term -1.28, no slope.
    loss, slope = loss_and_slope(make())
    assert loss == pytest.approx(0.5 * -1.25 + 0.25 * 0.8 + 0.25 * -1.28)
    assert slope == pytest.approx([-0.625, 0.0, 0.0])


def test_sampler_ratio_keeps_the_slope_where_it_undoes_a_large_change():
    # 0.75 with A > 0 and 1.8 with A < 0 are the worse of the two terms: their slopes are -A r
    loss, slope = loss_and_slope(make(advantages=[1.0, 1.0, -1.0]))
    assert loss == pytest.approx(0.5 * -1.25 + 0.25 * -0.75 + 0.25 * 1.8)
    assert slope == pytest.approx([-0.625, -0.1875, 0.45])


FLIPPED = [math.log(2.9), math.log(3.1), math.log(8394)]  # of one token, when the router chooses otherwise


def test_a_token_on_which_learner_and_engine_differ_does_not_rule_a_batch():
    gaps = [math.log(0.7), math.log(1.25), *FLIPPED]
    tokens = make(pi=[1.0] * 5, mu=[math.exp(-gap) for gap in gaps], advantages=[-1.0] * 5, weights=[0.2] * 5)
    loss, slope = loss_and_slope(tokens)
    # below 0.8 the step would only add to the change; from 3 on the term is 3, without a slope
    assert loss == pytest.approx(0.2 * (0.8 + 1.25 + 2.9 + 3 + 3), rel=1e-5)
    assert slope == pytest.approx([0, 0.2 * 1.25, 0.2 * 2.9, 0, 0], rel=1e-5)
    found = metrics(tokens)
    assert found["ratio/clipped_dual"] == pytest.approx(2 / 5)
    assert "ratio/clipped_dual" not in metrics(tokens, objective="decoupled")


@pytest.mark.parametrize("objective", ["sampler_ratio", "decoupled"])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("gap", [-90.0, -9.0, -0.3, 0.0, 0.3, 1.0, 1.2, 9.0, 90.0])
def test_no_slope_is_steeper_than_the_documented_bound(objective, advantage, gap):
    logprobs = torch.tensor([-95.0 if gap < 0 else -0.1], requires_grad=True)
    one, reference = torch.ones(1), torch.tensor([-3.0])
    tokens = TrainedTokens(logprobs, one, (logprobs - gap).detach(), advantage * one, one, reference)
    loss, slope = loss_and_slope(tokens, objective=objective, kl_coefficient=0.01)
    bound = 3.0 if objective == "sampler_ratio" else 5.0  # dual_clip; ratio_cap
    assert math.isfinite(loss)
    assert abs(slope[0]) <= bound + 0.01 * 3.0 * 20


def test_decoupled_weighs_by_the_capped_correction_and_never_clips():
    # corrections 1.25, 0.75 and min(1.8, 1.5); the ratio to the weights before the step is 1
    loss, slope = loss_and_slope(make(), objective="decoupled", ratio_cap=1.5)
    expected = [0.5 * -1.25, 0.25 * 0.75, 0.25 * -1.5]
    assert loss == pytest.approx(sum(expected))
    assert slope == pytest.approx(expected)


def test_sft_is_the_weighted_negative_log_likelihood():
    loss, slope = loss_and_slope(make(), objective="sft")
    assert loss == pytest.approx(-sum(w * math.log(p) for w, p in zip(WEIGHTS, PI, strict=True)))
    assert slope == pytest.approx([-0.5, -0.25, -0.25])


def test_gspo_gives_all_tokens_of_a_sequence_the_same_slope():
    # tokens 0 and 2 are one sequence: s = sqrt(1.25 * 1.8); token 1 is another one: s = 0.75
    s = math.sqrt(1.25 * 1.8)
    tokens = make(advantages=[-1.0, -1.0, -1.0], sequence=[0, 2, 0])
    loss, slope = loss_and_slope(tokens, objective="gspo", sequence_clip_low=1.0)
    assert loss == pytest.approx((0.5 + 0.25) * s + 0.25 * 0.75)
    assert slope == pytest.approx([0.75 * s / 2, 0.25 * 0.75, 0.75 * s / 2])


def test_gspo_clips_by_sequence_and_says_how_many_tokens_that_is():
    # s = 0.968 with A < 0 is below 1 - 3e-4; s = 1.8 with A > 0 is above 1 + 4e-4: no token has a slope
    tokens = make(advantages=[-1.0, -1.0, 1.0], sequence=[0, 0, 2])
    loss, slope = loss_and_slope(tokens, objective="gspo")
    assert loss == pytest.approx((0.5 + 0.25) * (1 - 3e-4) - 0.25 * (1 + 4e-4))
    assert slope == [0.0, 0.0, 0.0]
    found, s = metrics(tokens, objective="gspo"), math.sqrt(1.25 * 0.75)
    assert (found["ratio/clipped_low"], found["ratio/clipped_high"]) == pytest.approx((2 / 3, 1 / 3))
    assert found["ratio/sequence_mean"] == pytest.approx((2 * s + 1.8) / 3)
    assert found["ratio/sequence_spread"] == pytest.approx((math.log(1.8) - 2 * math.log(s)) / 3)


def test_cispo_keeps_every_gradient_and_caps_its_weight():
    # weights 1.25, 0.75 and min(1.8, 1.5), all without a gradient of their own
    loss, slope = loss_and_slope(make(), objective="cispo", ratio_cap=1.5)
    expected = [0.5 * -1.25, 0.25 * 0.75, 0.25 * -1.5]
    assert slope == pytest.approx(expected)
    assert loss == pytest.approx(sum(e * math.log(p) for e, p in zip(expected, PI, strict=True)))
    assert metrics(make(), objective="cispo", ratio_cap=1.5)["ratio/capped_share"] == pytest.approx(1 / 3)


def test_expected_divergence_under_the_sampler_has_the_true_slope():
    torch.manual_seed(0)
    logits, mu, ref = (torch.randn(11, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    pi, mu, ref = (x.log_softmax(-1) for x in (logits, mu, ref))
    zeros = torch.zeros(11, dtype=torch.float64)
    tokens = TrainedTokens(pi, zeros, mu, zeros, mu.exp(), ref)

    class Unbounded(LossConfig, frozen=True, kw_only=True):
        dual_clip: ClassVar[float] = 1e6

    config = Unbounded(kl_coefficient=1.0, sampler_coefficient=0.0)
    estimate = PolicyObjective(config)(tokens)[0]
    true = (pi.exp() * (pi - ref)).sum()
    assert estimate.item() == pytest.approx(true.item())
    slopes = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (estimate, true)]
    assert torch.allclose(*slopes)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("gap", [200.0, -200.0])  # float32 ends at e^88
def test_a_hopeless_ratio_stays_finite(objective, gap):
    logprobs = torch.tensor([min(gap, 0.0) - 0.1] * 2, requires_grad=True)
    sampler, advantages = (logprobs - gap).detach(), torch.tensor([-1.0, 1.0])
    one, each = torch.ones(2), torch.tensor([0, 1])
    tokens = TrainedTokens(logprobs, one, sampler, advantages, one, sampler - 100, None, each, 2)
    loss, slope = loss_and_slope(tokens, objective=objective, kl_coefficient=0.001)
    assert math.isfinite(loss)
    assert all(map(math.isfinite, slope))
    assert all(map(math.isfinite, metrics(tokens, objective=objective).values()))


def test_no_tokens_are_no_loss_but_a_graph():
    empty = make([], [], [], [])
    loss, slope = loss_and_slope(empty)
    assert (loss, slope) == (0.0, [])
    assert metrics(make([], [], [], []), make())["policy/tokens"] == 3


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_statistics_add_up_over_any_split(objective):
    whole = metrics(make(), objective=objective)
    parts = [make(*([x[i]] for x in (PI, MU, ADVANTAGES, WEIGHTS))) for i in range(3)]
    assert metrics(*parts, objective=objective) == pytest.approx(whole)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_curves_of_every_objective_are_documented(objective):
    found = metrics(make(), objective=objective, mask_shift=0.1, mask_sequence=0.1) | metrics(
        dataclasses.replace(make(reference=PI), proximal=torch.zeros(3)), kl_coefficient=0.1
    )
    assert [name for name in found if not meaning(name)] == []


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_slopes_are_those_of_finite_differences(objective):
    """Weights without a gradient are held fixed, as a slope is defined: through pi_prox = pi, and cispo's."""
    torch.manual_seed(1)
    pi, mu, before = (-torch.rand(6, dtype=torch.float64) for _ in range(3))
    more = {"sequence_clip_low": 0.2, "sequence_clip_high": 0.28}
    more["sampler_coefficient"] = 0.0 if objective == "cispo" else 0.01
    objective_of = PolicyObjective(LossConfig(objective=objective, **more))
    tokens = TrainedTokens(
        pi.clone().requires_grad_(),
        torch.ones(6),
        mu,
        torch.tensor([1.0, 1, -1, -1, -1, 1]),
        torch.rand(6, dtype=torch.float64),
        None,
        before if objective == "decoupled" else None,
        torch.tensor([0, 0, 1, 1, 1, 2]),
        3,
    )
    objective_of(tokens)[0].backward()
    for index, slope in enumerate(tokens.logprobs.grad):
        step = torch.zeros(6, dtype=torch.float64)
        step[index] = 1e-6
        ends = [objective_of(dataclasses.replace(tokens, logprobs=pi + sign * step))[0] for sign in (1, -1)]
        difference = (ends[0] - ends[1]).item() / 2e-6
        if objective == "cispo":  # d(r log pi) = r log pi + r, of which only the second is its slope
            difference -= slope.item() * pi[index].item()
        assert difference == pytest.approx(slope.item(), abs=1e-7)


def test_curves_say_what_they_are_named():
    found = metrics(make())
    ratios = [1.25, 0.75, 1.8]
    gaps = [math.log(r) for r in ratios]
    assert found["gap/mean"] == pytest.approx(sum(gaps) / 3, abs=1e-6)
    assert found["gap/k3"] == pytest.approx(
        sum(r - 1 - g for r, g in zip(ratios, gaps, strict=True)) / 3, abs=1e-6
    )
    assert found["gap/max"] == pytest.approx(math.log(1.8))
    assert math.log(1.8) <= found["gap/p99"] <= 1.13 * math.log(1.8)
    assert found["gap/far_share"] == 0
    assert found["ratio/mean"] == pytest.approx(3.8 / 3)
    assert found["ratio/effective_share"] == pytest.approx(3.8**2 / 3 / sum(r * r for r in ratios))
    assert (found["ratio/clipped_low"], found["ratio/clipped_high"]) == pytest.approx((1 / 3, 1 / 3))
    assert found["policy/entropy"] == pytest.approx(0.7)
    # of what the sampler says: the learner's own numbers would hide a sampler that filters
    surprise = sum(-math.log(p) for p in MU) / 3 - 0.7
    assert found["policy/surprise_balance"] == pytest.approx(surprise, abs=1e-6)


def test_optimizer_steps_of_a_decoupled_batch_are_not_part_of_its_gap():
    before = torch.tensor([math.log(p) for p in (0.4, 0.25, 0.5)])
    found = metrics(dataclasses.replace(make(), proximal=before), objective="decoupled")
    gap = math.log(0.25 / 0.20)
    assert found["gap/mean"] == pytest.approx(gap / 3, abs=1e-6)
    assert found["gap/k3"] == pytest.approx((1.25 - 1 - gap) / 3, abs=1e-6)
    assert found["gap/max"] == pytest.approx(gap)
    assert found["ratio/mean"] == pytest.approx(3.8 / 3), "the ratio is that of the weights of each step"


def test_decoupled_clips_around_the_weights_before_the_batch():
    before = torch.tensor([0.25, 0.5, 0.5]).log()
    tokens = dataclasses.replace(make(), proximal=before)
    found = metrics(tokens, objective="decoupled", ratio_cap=1.1)
    ratios, corrections = np.array(PI) / before.exp().numpy(), before.exp().numpy() / np.array(MU)
    assert found["ratio/clipped_high"] == np.mean((ratios > 1.28) & (np.array(ADVANTAGES) > 0))
    assert found["ratio/clipped_low"] == np.mean((ratios < 0.8) & (np.array(ADVANTAGES) < 0))
    assert found["ratio/capped_share"] == pytest.approx(np.mean(corrections > 1.1))
    assert "ratio/clipped_high" not in metrics(make(), objective="decoupled"), (
        "one step per batch never clips"
    )


def test_an_entropy_bonus_is_taken_off_the_loss_with_each_tokens_weight():
    plain, bonus = (loss_and_slope(make(), entropy_coefficient=c)[0] for c in (0.0, 0.5))
    assert bonus == pytest.approx(plain - 0.5 * 0.7 * sum(WEIGHTS))
