"""Show what stale samples cost each objective: python -m tests.bench.staleness.

The policy is a table of logits, one for each word and operator of the bug tasks, and an episode is the choice
of an operator. Groups, advantages and objectives are those of a run, with several passes over each batch. The
weights that sample a batch are `age` batches older than those that it trains: nothing else differs.
"""

import numpy as np
import torch

from hpc_swe import cli, tables
from hpc_swe.plugins.advantages.grpo import Grpo
from hpc_swe.plugins.policies.base import LossConfig, TrainedTokens
from hpc_swe.plugins.tasksets._bugs_grammar import OPEN, OPERATORS, WORDS
from hpc_swe.roles.learner.loss import PolicyObjective

AGES = (0, 1, 2, 3)
OBJECTIVES = ("sampler_ratio", "decoupled", "cispo")
BATCHES, GROUPS, SIZE, PASSES, LR, SEEDS = 10, 32, 8, 8, 0.06, 8
UNLIKELY = -6.0
"""Logit of an operator that the word does not leave open."""


def chosen(logits: torch.Tensor, words: torch.Tensor, operators: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities [n] of choices."""
    return torch.log_softmax(logits, -1)[words].gather(1, operators[:, None])[:, 0]


def warm_start(generator: torch.Generator) -> torch.Tensor:
    """Return logits [words, operators] that choose among the plausible operators at about equal chance."""
    count = len(WORDS)
    logits = torch.full((count, len(OPERATORS)), UNLIKELY)
    for step in OPEN:
        places = (torch.arange(count) + step) % len(OPERATORS)
        logits[torch.arange(count), places] = 0.3 * torch.randn(count, generator=generator)
    return logits


def train(age: int, objective: str, seed: int) -> list[float]:
    """Return the solve rate of the weights after each batch."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    logits = torch.nn.Parameter(warm_start(generator))
    optimizer = torch.optim.Adam([logits], lr=LR, betas=(0.9, 0.98))
    loss_of, estimate = PolicyObjective(LossConfig(objective=objective)), Grpo()
    versions, rates = [logits.detach().clone()], []
    for batch in range(BATCHES):
        words = torch.from_numpy(rng.integers(0, len(WORDS), GROUPS)).repeat_interleave(SIZE)
        sampler = versions[max(0, batch - age)]
        probabilities = torch.softmax(sampler, -1)[words]
        operators = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        rewards = (
            (operators == words).float().view(GROUPS, SIZE)
        )  # the right operator of word n is operator n
        advantages = torch.tensor([value for group in rewards.tolist() for value in estimate(group)])
        before = chosen(logits, words, operators).detach()
        for _ in range(PASSES):
            loss, _, _ = loss_of(
                TrainedTokens(
                    logprobs=chosen(logits, words, operators),
                    entropy=torch.zeros_like(before),
                    sampler=chosen(sampler, words, operators),
                    advantages=advantages,
                    weights=torch.full_like(before, 1 / len(before)),
                    reference=None,
                    proximal=before if loss_of.needs_proximal else None,
                )
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        versions.append(logits.detach().clone())
        rates.append(float(torch.softmax(versions[-1], -1).diagonal().mean()))
    return rates


def mean_rates(age: int, objective: str, seeds: int = SEEDS) -> list[float]:
    """Return the mean over seeds of the solve rate after each batch."""
    return [float(rate) for rate in np.mean([train(age, objective, seed) for seed in range(seeds)], axis=0)]


@cli.command
def main() -> None:
    """Print a row for each objective and age."""
    cli.parse(cli.parser("tests.bench.staleness", "Show what stale samples cost each objective."))
    found = tables.table(("objective", "age"), tuple(str(batch + 1) for batch in range(BATCHES)))
    for objective in OBJECTIVES:
        for age in AGES:
            found.add_row(objective, str(age), *(f"{rate:.2f}" for rate in mean_rates(age, objective)))
    tables.show(tables.console, found)
    tables.say(
        f"solve rate of the weights after each batch, {PASSES} passes over each, mean of {SEEDS} seeds"
    )


if __name__ == "__main__":
    main()
