"""Turn groups into the next batch: decide about groups, plan and build the batch (all pure), then commit.

The rename to batches/step_n is the only commit point. The manifest contains the coordinator's state after the
batch, which is one group number and one rate. A coordinator that starts reads it there, and finds everything
else in the spools. The content of a batch is a function of the results of its groups.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from hpc_swe.base.errors import CorruptRecord, LostRace
from hpc_swe.base.records import Batch, BatchManifest, CoordinatorState, ScoredEpisode
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders, weights
from hpc_swe.base.store.task_history import RunHistory
from hpc_swe.config.settings import BatchesConfig, GroupsConfig, ShapingConfig
from hpc_swe.models.advantages.base import Advantage
from hpc_swe.roles.coordinator.batching.groups import Group
from hpc_swe.roles.coordinator.batching.packing import pack_minibatches, token_weights
from hpc_swe.roles.coordinator.batching.samples import EpisodeSamples, make_samples
from hpc_swe.roles.coordinator.batching.shaping import penalty

NO_SIGNAL = 1e-9  # smaller advantages are rounding errors


@dataclass(frozen=True)
class BatchSettings:
    """Set how groups become batches."""

    groups: GroupsConfig
    batches: BatchesConfig
    advantage: Advantage
    data_parallel: int
    shaping: ShapingConfig = ShapingConfig()
    minibatches: int = 1
    """Optimizer steps of one pass over a batch."""
    routing_bytes: int | None = None
    """Size of a token's routing in the model that is trained; None accepts any."""
    straggler_s: float = math.inf
    """A group closes when each unfinished member has been worked on for longer than this."""


@dataclass(frozen=True)
class GroupDecision:
    """Record what is done with a closed group in one step."""

    status: Literal["trained", "no_signal", "too_few", "too_old"]
    episodes: list[EpisodeSamples]
    """Episodes with a loss."""
    has_signal: bool = False
    """Whether rewards alone give a trained token an advantage that is not 0."""


@dataclass(frozen=True)
class BatchPlan:
    """Record which groups the next batch trains and closes."""

    step: int
    groups: list[int]
    """Groups that are trained."""
    closed: list[int]
    """Groups that are closed without being trained."""
    decisions: dict[int, GroupDecision]
    after: CoordinatorState
    """State of the coordinator after the batch."""


def decide(group: Group, step: int, settings: BatchSettings) -> GroupDecision:
    """Compute the advantages and samples of a group in batch `step`, and decide if it is trained.

    Penalties change the advantages, but not whether the group has signal.

    An episode that was too long is trained (``train``), counts for the baseline of its siblings only
    (``mask_loss``), or not at all (``drop_from_baseline``); an episode without a loss is in no denominator. A
    group with a token over `max_staleness` is dropped as a whole: its baseline is biased without its longest
    member. It was dispatched for an earlier batch, which more groups with signal than expected have filled.
    """
    overlong, limits = settings.batches.overlong, settings.groups
    drops = overlong == "drop_from_baseline"
    baseline = [s for s in group.results if not (drops and s.episode.exit_status.is_overlong)]
    if len(baseline) < 2:
        return GroupDecision("too_few", [])
    chains, estimates = settings.batches.train_chains, _estimates(group, baseline, settings)
    episodes, has_signal = [], False
    for s, (by_reward, advantage) in zip(baseline, estimates, strict=True):
        if overlong == "train" or not s.episode.exit_status.is_overlong:
            cut = make_samples(s.episode, advantage, chains, step)
            episodes.append(cut)
            has_signal |= cut.tokens > 0 and abs(by_reward) > NO_SIGNAL
    if any((c.staleness > limits.max_staleness).any() for c in episodes):
        return GroupDecision("too_old", [])
    if limits.resample and not has_signal:
        return GroupDecision("no_signal", [])
    return GroupDecision("trained", episodes, has_signal)


def plan_batch(
    decision_of: Callable[[int], GroupDecision | None],
    state: CoordinatorState,
    step: int,
    groups_per_step: int,
) -> BatchPlan | None:
    """Choose the groups of the batch that follows `state`; return None while one that it needs is open.

    Groups that were dropped for their age do not count in the rate of groups with signal: those that are too
    many would otherwise lower it, so that even more are dispatched.
    """
    decisions: dict[int, GroupDecision] = {}
    trained: list[int] = []
    group = state.next_group
    while len(trained) < groups_per_step:
        decision = decision_of(group)
        if decision is None:
            return None
        decisions[group] = decision
        trained += [group] if decision.status == "trained" else []
        group += 1
    judged = sum(decision.status != "too_old" for decision in decisions.values())
    rate = (state.signal_rate * groups_per_step + len(trained)) / (groups_per_step + judged)
    after = CoordinatorState(next_group=group, signal_rate=rate)
    return BatchPlan(step, trained, sorted(decisions.keys() - set(trained)), decisions, after)


def build_batches(batch_plan: BatchPlan, settings: BatchSettings) -> list[Batch]:
    """Build the planned batch, one part for each data-parallel rank."""
    episodes = [c for group in batch_plan.groups for c in batch_plan.decisions[group].episodes if c.tokens]
    weights = token_weights([c.tokens for c in episodes], settings.batches.aggregate)
    weighted = [
        [(s, weight) for s in c.samples if any(s.mask)] for c, weight in zip(episodes, weights, strict=True)
    ]
    return pack_minibatches(
        batch_plan.step,
        weighted,
        settings.batches.microbatch_tokens,
        settings.data_parallel,
        settings.minibatches,
    )


def commit(
    run: RunDir,
    batch_plan: BatchPlan,
    batches: list[Batch],
    stats: dict[str, float],
    held_out: Sequence[Batch] = (),
    history: RunHistory | None = None,
) -> None:
    """Publish the batch, with the history after it; `stats` are the metrics in its manifest.

    `held_out` is to be validated with it. Raise LostRace if another coordinator published this step.
    """
    named = [(run.rank_file(batch.rank), batch) for batch in batches]
    named += [(run.validation_file(batch.rank), batch) for batch in held_out]
    files = {name: atomic.encode(Path(name), batch) for name, batch in named}
    if history is not None:
        known = run.history(batch_plan.step)
        files[known.name] = atomic.encode(known, history)

    def fill(stage: Path) -> BatchManifest:
        return BatchManifest(
            writer=atomic.identity(),
            files={name: folders.write(stage, name, data) for name, data in files.items()},
            step=batch_plan.step,
            groups=batch_plan.groups,
            closed=batch_plan.closed,
            after=batch_plan.after,
            stats=stats,
        )

    folders.publish(run.batch(batch_plan.step), fill)


def published_steps(run: RunDir) -> list[int]:
    """Return the steps of the published batches, oldest first."""
    return sorted(folders.published(run.batches, BatchManifest, lambda manifest: manifest.step, run.batch))


def require_newest(run: RunDir, step: int) -> None:
    """Raise LostRace if another coordinator has published batch `step`, or one after it.

    A batch that was published while this process was frozen may have been deleted since; the newest never is.
    """
    if published := [other for other in published_steps(run) if other >= step]:
        raise LostRace(f"{run.batch(published[0])} was published by another coordinator")


def newest(run: RunDir) -> BatchManifest | None:
    """Return the manifest of the newest batch, which holds the state after it; None before the first one.

    Raise CorruptRecord when none can be read although some were trained: their groups would be sampled again.
    """
    if steps := published_steps(run):
        return folders.manifest(run.batch(steps[-1]), BatchManifest)
    trained = max((version.step for version in weights.published(run)), default=0)
    if trained:
        raise CorruptRecord(
            f"{run.batches}: no batch is intact, but {run.weights} has step {trained}; put a batch back, or "
            "start another run from the newest weights"
        )
    return None


def _estimates(
    group: Group, baseline: list[ScoredEpisode], settings: BatchSettings
) -> list[tuple[float, float]]:
    """Return two advantages of each episode: by the rewards alone, and less its penalty beyond the mean."""
    estimator = settings.advantage.for_group(group.key[1])
    by_reward = estimator([scored.score.reward or 0.0 for scored in baseline])
    penalties = estimator.arranged([penalty(scored, settings.shaping) for scored in baseline])
    mean = fmean(penalties)
    return [(value, value - (taken - mean)) for value, taken in zip(by_reward, penalties, strict=True)]
