"""Groups -> the next batch: judge, compose, assemble (pure), then commit.

The rename onto batches/step_n is the only commit point. Its manifest carries the coordinator's state
after it, which is one group number and one rate: whoever starts next reads it there and finds all else
in the spools. What a batch holds is a function of the results of its groups.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from hpc_swe.plugins.advantages.base import Advantage
from hpc_swe.plugins.advantages.shuffled import Shuffled
from hpc_swe.records import Batch, BatchManifest, CoordinatorState, ScoredEpisode
from hpc_swe.roles.coordinator.groups import Group
from hpc_swe.roles.coordinator.packing import pack, weigh
from hpc_swe.roles.coordinator.samples import Cut, cut
from hpc_swe.rundir import RunDir
from hpc_swe.settings import BatchesConfig, GroupsConfig
from hpc_swe.store import atomic, folders

NO_SIGNAL = 1e-9  # advantages below are rounding
STEP = re.compile(r"step_([0-9]{6}|[1-9][0-9]{6,8})")


@dataclass(frozen=True)
class Recipe:
    """How groups become batches."""

    groups: GroupsConfig
    batches: BatchesConfig
    advantage: Advantage
    data_parallel: int


@dataclass(frozen=True)
class Verdict:
    """What becomes of a closed group in one step."""

    fate: Literal["trained", "no_signal", "too_few", "too_old"]
    cuts: list[Cut]
    """Episodes with a loss."""


@dataclass(frozen=True)
class Composition:
    """The next batch, decided."""

    step: int
    groups: list[int]
    closed: list[int]
    verdicts: dict[int, Verdict]
    after: CoordinatorState


def judge(group: Group, step: int, recipe: Recipe) -> Verdict:
    """Advantages and samples of a group in batch `step`.

    A truncated episode counts for all (``train``), for its siblings' baseline only (``mask_loss``), or
    for nothing (``drop_from_baseline``); without a loss it is in no denominator. A group with a token
    over `hard_max_staleness` goes as a whole: without its longest member its baseline would be biased.
    """
    overlong, limits = recipe.batches.overlong, recipe.groups
    baseline = [s for s in group.results if overlong != "drop_from_baseline" or not _is_truncated(s)]
    if len(baseline) < 2:
        return Verdict("too_few", [])
    cuts = [
        cut(s.episode, advantage, recipe.batches.train_chains, step, limits.max_token_staleness)
        for s, advantage in zip(baseline, _advantages(group, baseline, recipe), strict=True)
        if overlong == "train" or not _is_truncated(s)
    ]
    if limits.hard_max_staleness and any((c.staleness > limits.hard_max_staleness).any() for c in cuts):
        return Verdict("too_old", [])
    if limits.resample and not any(has_signal(c) for c in cuts):
        return Verdict("no_signal", [])
    return Verdict("trained", cuts)


def compose(
    verdict_of: Callable[[int], Verdict | None], state: CoordinatorState, step: int, groups_per_step: int
) -> Composition | None:
    """The batch after `state`; None while a group that it depends on is open."""
    verdicts: dict[int, Verdict] = {}
    for group in count(state.next_group):
        verdict = verdict_of(group)
        if verdict is None:
            return None
        verdicts[group] = verdict
        trained = [g for g, v in verdicts.items() if v.fate == "trained"]
        if len(trained) == groups_per_step:
            closed = sorted(verdicts.keys() - set(trained))
            rate = (state.signal_rate * groups_per_step + len(trained)) / (groups_per_step + len(verdicts))
            after = CoordinatorState(next_group=group + 1, signal_rate=rate)
            return Composition(step, trained, closed, verdicts, after)
    raise AssertionError("count() does not end")


def assemble(composition: Composition, recipe: Recipe) -> list[Batch]:
    """Weights and microbatches of a composition, one batch per data-parallel rank."""
    cuts = [c for group in composition.groups for c in composition.verdicts[group].cuts]
    weights = weigh([c.tokens for c in cuts], recipe.batches.aggregate, recipe.batches.constant_length)
    samples = [(s, w) for c, w in zip(cuts, weights, strict=True) for s in c.samples if any(s.mask)]
    return pack(
        composition.step,
        [s for s, _ in samples],
        [w for _, w in samples],
        recipe.batches.microbatch_tokens,
        recipe.data_parallel,
    )


def commit(run: RunDir, composition: Composition, batches: list[Batch], stats: dict[str, float]) -> None:
    """Publish the batch.

    Raises:
        LostRace: Another coordinator published this step.
    """
    files = {run.rank_file(batch.rank): atomic.encode(Path(run.rank_file(0)), batch) for batch in batches}

    def fill(stage: Path) -> BatchManifest:
        return BatchManifest(
            writer=atomic.identity(),
            files={name: folders.write(stage, name, data) for name, data in files.items()},
            step=composition.step,
            groups=composition.groups,
            closed=composition.closed,
            after=composition.after,
            stats=stats,
        )

    folders.publish(run.batch(composition.step), fill)


def steps(run: RunDir) -> list[int]:
    """Published batches, oldest first."""
    return sorted(folders.published(run.batches, BatchManifest, _step, lambda manifest: manifest.step))


def newest(run: RunDir) -> BatchManifest | None:
    """The last commit; None in a new run."""
    published = steps(run)
    return folders.manifest(run.batch(published[-1]), BatchManifest) if published else None


def _step(name: str) -> int | None:
    parts = STEP.fullmatch(name)
    return int(parts[1]) if parts else None


def _is_truncated(scored: ScoredEpisode) -> bool:
    return scored.episode.exit_status.is_truncated


def _advantages(group: Group, baseline: list[ScoredEpisode], recipe: Recipe) -> Iterator[float]:
    estimator = recipe.advantage
    if isinstance(estimator, Shuffled):
        estimator = estimator.for_group(group.key[1])
    yield from estimator([s.score.reward or 0.0 for s in baseline])


def has_signal(c: Cut) -> bool:
    """Whether an episode says anything about what was better."""
    return c.tokens > 0 and abs(c.advantage) > NO_SIGNAL
