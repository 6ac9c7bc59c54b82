"""Show whether a loop falls after it has learnt, and what prevents it: python -m tests.bench.collapse.

The policy is a GRU with 30,000 weights, and an episode has the form of those of the demo: a task is a word,
an answer works something out and ends with a call, a call of a wrong form only costs a turn, and a repair is
right with one of the three operators between which a warm start has left the choice open. Advantages, weights
of tokens, minibatches and objectives are those of a run. Each batch is sampled by the weights of `staleness`
batches before. Like the loop on four GPUs it learns first, and then forgets how to write calls.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from hpc_swe.base import cli, tables
from hpc_swe.models.advantages.grpo import Grpo
from hpc_swe.models.policies.base import LossConfig, OptimizerConfig, TrainedTokens
from hpc_swe.roles.coordinator.batching.packing import split, token_weights
from hpc_swe.roles.learner.loss import PolicyObjective

WORDS, OPERATORS = 16, 9
BEGIN, END, OPEN, CLOSE, REPAIR, SUBMIT, TEST, FINE, WRONG = range(9)
WORD, OPERATOR = 9, 9 + WORDS  # the first token of each kind
VOCABULARY = OPERATOR + OPERATORS
WORKED = 5
"""Tokens that an answer works out before its call."""
TURNS, TURN_TOKENS = 6, 16
GROUPS, SIZE, TURN_PENALTY = 24, 8, 0.02
UNITS, WARM_STEPS, WARM_RATE = 64, 1200, 3e-3
BATCHES, LAST = 20, 5
"""Batches over which the solve rate at the end is a mean."""


@dataclass(frozen=True)
class Recipe:
    """What may differ between two runs; the optimizer's rate is that of a policy as small as this one."""

    loss: LossConfig
    optimizer: OptimizerConfig
    staleness: int = 1


def recipe(rate: float, *, passes: int = 3, staleness: int = 1, **loss: object) -> Recipe:
    """Return a recipe with the optimizer of the demo on two GPUs."""
    optimizer = OptimizerConfig(
        lr=rate, epochs=passes, minibatches=3, warmup_steps=2, beta2=0.98, clip_grad=0.2, weight_decay=0.0
    )
    return Recipe(LossConfig(**loss), optimizer, staleness)  # type: ignore[arg-type]


RECIPES = {
    "clip": recipe(2e-3, objective="decoupled", sampler_coefficient=0.0),
    "clip-half-rate": recipe(1e-3, objective="decoupled", sampler_coefficient=0.0),
    "clip-new-tokens": recipe(2e-3, objective="decoupled", sampler_coefficient=0.0, staleness=0),
    "clip-one-pass": recipe(2e-3, objective="decoupled", sampler_coefficient=0.0, passes=1),
    "square": recipe(2e-3, objective="decoupled"),
    "square-half-rate": recipe(1e-3, objective="decoupled"),
    "square-of-0.03": recipe(2e-3, objective="decoupled", sampler_coefficient=0.03),
    "square-around-mu": recipe(2e-3, objective="sampler_ratio"),
    "mu": recipe(2e-3, objective="sampler_ratio", sampler_coefficient=0.0),
}
"""clip: no term holds the weights near those that sampled. square: sampler_coefficient is at its default."""
SHOWN = ("clip", "square", "square-half-rate")


class Policy(nn.Module):
    """Predict the next token from all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, UNITS)
        self.cells = nn.GRU(UNITS, UNITS, batch_first=True)
        self.output = nn.Linear(UNITS, VOCABULARY)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [n, tokens, VOCABULARY] of what follows each token, and the last state."""
        hidden, state = self.cells(self.embedding(tokens), state)
        return torch.log_softmax(self.output(hidden), -1), state


@dataclass
class Episode:
    """A task's word, and all tokens so far."""

    word: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the sampler; 0 for tokens that it did not sample."""
    sampled: list[bool] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    turns: int = 0
    repair: int = -1
    is_over: bool = False

    def __post_init__(self) -> None:
        self.show(BEGIN, WORD + self.word)

    @property
    def is_solved(self) -> bool:
        return self.is_over and self.repair == right(self.word)

    def show(self, *tokens: int) -> None:
        """Append tokens of the environment."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.sampled += [False] * len(tokens)

    def take(self, token: int, logprob: float) -> int | None:
        """Append a token of the policy; return the result of the call that it ends, if it ends one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.sampled.append(True)
        self.turn.append(token)
        if token != END and len(self.turn) < TURN_TOKENS:
            return None
        call, self.turn, self.turns = call_of(self.turn), [], self.turns + 1
        repairs = len(call) == 3 and call[:2] == [REPAIR, WORD + self.word] and call[2] >= OPERATOR
        if repairs:
            self.repair = call[2] - OPERATOR
        self.is_over = call == [SUBMIT] or self.turns == TURNS
        return FINE if repairs or call in ([SUBMIT], [TEST]) else WRONG


def right(word: int) -> int:
    """Return the only operator that solves the task of a word."""
    return (7 * word + 3) % OPERATORS


def call_of(answer: Sequence[int]) -> list[int]:
    """Return what stands between the last OPEN and CLOSE at the end of an answer; empty without a call."""
    if list(answer[-2:]) != [CLOSE, END] or OPEN not in answer:
        return []
    begin = len(answer) - list(answer)[::-1].index(OPEN)
    return list(answer[begin:-2])


def demonstration(rng: np.random.Generator) -> Episode:
    """Return an episode that repairs with one of three operators at random, and tests every other time."""
    episode = Episode(int(rng.integers(WORDS)))
    operator = (right(episode.word) + int(rng.choice([0, 4, 7]))) % OPERATORS
    work = [WORD + (episode.word + 1 + place) % WORDS for place in range(WORKED)]
    answers = [[*work, OPEN, REPAIR, WORD + episode.word, OPERATOR + operator, CLOSE, END]]
    answers += [[OPEN, TEST, CLOSE, END]] if rng.random() < 0.5 else []
    for answer in [*answers, [OPEN, SUBMIT, CLOSE, END]]:
        results = [episode.take(token, 0.0) for token in answer]
        if results[-1] is not None and not episode.is_over:
            episode.show(results[-1])
    return episode


def scored(policy: Policy, episodes: Sequence[Episode]) -> tuple[Tensor, Tensor]:
    """Return the log-probability and the entropy [n] of every sampled token, episode by episode."""
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(e.tokens) for e in episodes], batch_first=True)
    sampled = nn.utils.rnn.pad_sequence([torch.tensor(e.sampled) for e in episodes], batch_first=True)
    every, _ = policy(tokens[:, :-1])
    chosen = every.gather(2, tokens[:, 1:, None])[..., 0]
    return chosen[sampled[:, 1:]], -(every.exp() * every).sum(-1)[sampled[:, 1:]]


def warm_start(seed: int) -> Policy:
    """Return a policy that has learnt the demonstrations."""
    torch.manual_seed(seed)
    policy, rng = Policy(), np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=WARM_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(WARM_STEPS):
        share = min(1.0, (step + 1) / 20) * max(0.02, 1 - step / WARM_STEPS)
        optimizer.param_groups[0]["lr"] = WARM_RATE * share
        loss = -scored(policy, [demonstration(rng) for _ in range(32)])[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


@torch.no_grad()
def sample(policy: Policy, words: Sequence[int], generator: torch.Generator) -> list[Episode]:
    """Return an episode for each word."""
    episodes = [Episode(word) for word in words]
    _, state = policy(torch.full((len(words), 1), BEGIN))
    last, alive = [WORD + word for word in words], list(range(len(words)))
    shown: dict[int, int] = {}
    while alive:
        found, state = policy(torch.tensor(last)[:, None], state)
        drawn = torch.multinomial(found[:, 0].exp(), 1, generator=generator)
        logprobs = found[:, 0].gather(1, drawn)[:, 0].tolist()
        kept = []
        for row, index in enumerate(alive):
            episode = episodes[index]
            if index in shown:
                episode.show(shown.pop(index))
            elif (result := episode.take(int(drawn[row]), logprobs[row])) is not None:
                shown[index] = result
            if not episode.is_over:
                kept.append(row)
        alive = [alive[row] for row in kept]
        last, state = [episodes[index].tokens[-1] for index in alive], state[:, kept]
    return episodes


def with_advantages(episodes: Sequence[Episode]) -> list[tuple[Episode, float]]:
    """Return the episodes of the groups whose rewards differ, with their advantages, penalties included."""
    found, estimate = [], Grpo(scale_by_std=True)
    for first in range(0, len(episodes), SIZE):
        group = episodes[first : first + SIZE]
        rewards = [float(e.is_solved) for e in group]
        penalties = [TURN_PENALTY * e.turns * e.is_solved for e in group]
        if len(set(rewards)) > 1:
            pairs = zip(estimate(rewards), penalties, strict=True)
            advantages = [value - penalty + fmean(penalties) for value, penalty in pairs]
            found += zip(group, advantages, strict=True)
    return found


def minibatches(
    policy: Policy, episodes: Sequence[Episode], batch: int, recipe: Recipe
) -> list[tuple[list[Episode], dict[str, Tensor]]]:
    """Return the episodes of each optimizer step of a pass, with the numbers [n] of their tokens."""
    trained, found = with_advantages(episodes), []
    counts = [sum(episode.sampled) for episode, _ in trained]
    weights = token_weights(counts, "token_mean")
    for part in split(batch, len(trained), recipe.optimizer.minibatches) if trained else ():
        chosen, repeats = [trained[i][0] for i in part], torch.tensor([counts[i] for i in part])
        columns = {
            "sampler": [p for e in chosen for p, own in zip(e.logprobs, e.sampled, strict=True) if own],
            "advantages": torch.tensor([trained[i][1] for i in part]).repeat_interleave(repeats),
            "weights": torch.tensor([weights[i] * len(trained) / len(part) for i in part]),
            "sequence": torch.arange(len(part)).repeat_interleave(repeats),
        }
        columns["weights"] = columns["weights"].repeat_interleave(repeats)
        columns["sampler"] = torch.tensor(columns["sampler"])
        with torch.no_grad():
            columns["proximal"] = scored(policy, chosen)[0]
        found.append((chosen, columns))
    return found


def train(policy: Policy, recipe: Recipe, seed: int) -> list[float]:
    """Return the solve rate of each batch, under the weights that have sampled it; the policy is changed."""
    rng, generator = np.random.default_rng(1000 + seed), torch.Generator().manual_seed(seed)
    settings, objective = recipe.optimizer, PolicyObjective(recipe.loss)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(settings.beta1, settings.beta2), weight_decay=0)
    versions, sampler, rates = [copied(policy)], Policy(), []
    for batch in range(BATCHES):
        sampler.load_state_dict(versions[max(0, batch - recipe.staleness)])
        episodes = sample(sampler, rng.integers(0, WORDS, GROUPS).repeat(SIZE).tolist(), generator)
        rates.append(fmean(e.is_solved for e in episodes))
        optimizer.param_groups[0]["lr"] = settings.lr * min(1.0, (batch + 1) / settings.warmup_steps)
        parts = minibatches(policy, episodes, batch, recipe)
        for epoch in range(settings.epochs):
            for index in np.random.default_rng((batch, epoch)).permutation(len(parts)):
                chosen, columns = parts[index]
                tokens = TrainedTokens(
                    *scored(policy, chosen), **columns, reference=None, sequences=len(chosen)
                )
                optimizer.zero_grad()
                objective(tokens)[0].backward()
                nn.utils.clip_grad_norm_(policy.parameters(), settings.clip_grad)
                optimizer.step()
        versions.append(copied(policy))
    return rates


def copied(policy: Policy) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in policy.state_dict().items()}


def end_of(rates: Sequence[float]) -> float:
    """Return the mean solve rate of the last batches."""
    return fmean(rates[-LAST:])


def fall_of(rates: Sequence[float]) -> float:
    """Return by how much the solve rate fell most below its highest so far."""
    return max(max(rates[: place + 1]) - rate for place, rate in enumerate(rates))


@cli.command
def main() -> None:
    """Print a row for each recipe."""
    parser = cli.parser("tests.bench.collapse", "Show whether a loop falls after it has learnt.")
    parser.add_argument("recipes", nargs="*", choices=RECIPES, default=SHOWN, help="what is compared")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each, from as many warm starts")
    given = cli.parse(parser)
    torch.set_num_threads(1)
    found: dict[str, list[list[float]]] = {name: [] for name in given.recipes}
    for seed in range(given.seeds):
        start = warm_start(seed)
        for name, runs in found.items():
            runs.append(train(copy.deepcopy(start), RECIPES[name], seed))
            tables.say(f"seed {seed} {name:18} {' '.join(f'{rate:.2f}' for rate in runs[-1])}")
    columns = ("end", "lowest end", "largest fall, mean", "of all", "ends of all seeds")
    table = tables.table(("recipe",), columns)
    for name, runs in found.items():
        ends, falls = sorted(map(end_of, runs)), [fall_of(rates) for rates in runs]
        figures = (fmean(ends), ends[0], fmean(falls), max(falls))
        table.add_row(name, *(f"{x:.2f}" for x in figures), " ".join(f"{end:.2f}" for end in ends))
    tables.show(tables.console, table)
    tables.say(f"end: mean solve rate of the last {LAST} of {BATCHES} batches")


if __name__ == "__main__":
    main()
