"""Compare the log-probabilities of an engine's answers with those that a learner of any layout gives them.

The figures are those of `gap/` in a run's metrics, for a model whose weights no single GPU may hold. Where
the engine returns the experts of each token, the answers are scored twice: by experts that the learner's
router chooses, and by the engine's.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from rich.table import Table

from hpc_swe.base import tables
from hpc_swe.base.records import FREE, Record, Sampling
from hpc_swe.models.engines.base import Engine
from hpc_swe.models.policies.base import SteppingLearner
from hpc_swe.roles.learner.collective import on_rank_zero

PROMPT, LONGEST_PROMPT, ANSWER = 16, 1024, 64
"""Fewest and most tokens of a prompt, and most of an answer."""
TIMEOUT_S = 180.0
FAR = 1.0
OWN, REPLAYED = "the learner's own", "the engine's"


class SampledText(Record, frozen=True, kw_only=True):
    """Hold a text of prompt and answer, and what the engine says of it."""

    token_ids: list[int]
    logprobs: list[float]
    """Those of the answer."""
    experts: bytes
    """uint8 [tokens, layers * k]; empty where the engine returns none."""


class Gap(Record, frozen=True, kw_only=True):
    """Hold the absolute differences of log-probabilities between learner and engine."""

    tokens: int
    mean: float
    p99: float
    far: float
    """Share of tokens whose log-probabilities differ by more than 1."""


def compare(learner: SteppingLearner, engine: Engine, url: str, token: str, count: int) -> dict[str, Gap]:
    """Score `count` answers of the engine at `url`, by each choice of experts; all ranks call this together.

    Raise EngineError on every rank if an answer cannot be trusted.
    """
    longest = min(LONGEST_PROMPT, engine.max_model_len - ANSWER)
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(0, learner.vocabulary, length).astype(np.int32)
        for length in rng.integers(min(PROMPT, longest), longest, count, endpoint=True)
    ]

    def ask(prompt: np.ndarray) -> SampledText:
        done = engine.generate(url, token, prompt, Sampling(max_tokens=ANSWER), TIMEOUT_S)
        chosen = done.routing
        experts = b"" if chosen is None else chosen.tobytes() + bytes([FREE]) * chosen.shape[1]
        ids = [*prompt.tolist(), *done.token_ids]
        return SampledText(token_ids=ids, logprobs=list(done.logprobs), experts=experts)

    def sample() -> list[SampledText]:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(ask, prompts))

    answers = on_rank_zero(learner.ranks, sample)
    found = {OWN: _gap(learner, answers, replays=False)}
    if any(answer.experts for answer in answers):
        found[REPLAYED] = _gap(learner, answers, replays=True)
    return found


def _gap(learner: SteppingLearner, answers: Sequence[SampledText], *, replays: bool) -> Gap:
    differences = []
    for answer in answers:
        scores = learner.logprobs(answer.token_ids, answer.experts if replays else b"")
        differences.append(np.asarray(scores[-len(answer.logprobs) :]) - answer.logprobs)
    sizes = np.abs(np.concatenate(differences))
    return Gap(
        tokens=len(sizes),
        mean=float(sizes.mean()),
        p99=float(np.quantile(sizes, 0.99)),
        far=float((sizes > FAR).mean()),
    )


def table(gaps: dict[str, Gap]) -> Table:
    """Return a row for each choice of experts."""
    found = tables.table(("experts of the learner's forward pass",), ("tokens", "mean", "p99", "% above 1"))
    for name, gap in gaps.items():
        found.add_row(name, f"{gap.tokens:,}", f"{gap.mean:.4f}", f"{gap.p99:.4f}", f"{100 * gap.far:.3f}")
    return found
