"""Compute the metrics of a batch. The functions are pure, so the same results give the same manifest.

Reward and solve rate include every episode of every group that the batch closes, trained or filtered, in the
order of dispatch. So they depend neither on which groups had signal nor on which finished first.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

import msgspec
import numpy as np

from hpc_swe.base.records import FREE, Batch, EngineTime, MicroBatch, ScoredEpisode
from hpc_swe.config.settings import ShapingConfig
from hpc_swe.roles.coordinator.batching.batches import BatchPlan, GroupDecision
from hpc_swe.roles.coordinator.batching.groups import Group
from hpc_swe.roles.coordinator.batching.samples import count_sequences, sampled_tokens
from hpc_swe.roles.coordinator.batching.shaping import penalty

Decided = list[tuple[Group, GroupDecision]]
RECORDED = ("chains", "undelivered", "continued", "parse_errors", "context_full", "ignored_settings")
"""Counters of the recorder in `Episode.counts`."""
TURNS = (0, 1, 4, 16, 64)
"""Lower bounds of the ranges of turns for which infrastructure failures are counted separately."""


def of_batch(groups: Sequence[Group], batch_plan: BatchPlan) -> dict[str, float]:
    """Return all metrics that follow from results alone; `groups` are those that the batch closes."""
    decided = [(group, batch_plan.decisions[group.key[1]]) for group in groups]
    results = [scored for group in groups for scored in group.results]
    rewards = _rewards(results)
    trained = [s for g, v in decided if v.status == "trained" for s in g.results]
    kinds = Counter(decision.status for _, decision in decided)
    return {
        "reward/mean": _mean(rewards),
        "reward/std": pstdev(rewards or [0.0]),
        "reward/trained_mean": _mean(_rewards(trained)),
        "solve/train": _solved(results),
        "solve/trained": _solved(trained),
        "groups/signal_rate": _signal_rate([decision for _, decision in decided]),
        "groups/all_solved": _mean([_solved(group.results) == 1.0 for group in groups if group.results]),
        "groups/no_signal": kinds["no_signal"],
        "groups/dropped_few": kinds["too_few"],
        "groups/dropped_old": kinds["too_old"],
        "episodes/finished": float(len(results)),
        **_staleness(decided),
        **_episodes(results),
        **_lengths(decided),
    }


def of_sources(
    groups: Sequence[Group], batch_plan: BatchPlan, source_of: Mapping[str, str]
) -> dict[str, float]:
    """Return the metrics of each part of a mixture; none when all tasks are from one taskset."""
    sources = sorted(set(source_of.values()))
    values: dict[str, float] = {}
    for source in sources if len(sources) > 1 else ():
        own = [group for group in groups if source_of[group.members[0].request.task_id] == source]
        results = [scored for group in own for scored in group.results]
        values[f"taskset/groups/{source}"] = float(len(own))
        if results:
            decisions = [batch_plan.decisions[group.key[1]] for group in own]
            values[f"taskset/reward/{source}"] = _mean(_rewards(results))
            values[f"taskset/solve/{source}"] = _solved(results)
            values[f"taskset/signal/{source}"] = _signal_rate(decisions)
    return values


def mean_shaped(groups: Sequence[Group], config: ShapingConfig) -> float:
    """Return the mean reward of the groups' results, less their penalties."""
    results = [scored for group in groups for scored in group.results]
    return _mean(_rewards(results)) - _mean([penalty(scored, config) for scored in results])


def of_packing(batches: Sequence[Batch], budget: int) -> dict[str, float]:
    """Return the size of a batch, and how full its microbatches are; `budget` is in tokens."""
    micro = [m for batch in batches for m in batch.microbatches]
    return {
        "batch/tokens": float(sum(int(m.mask_array.sum()) for m in micro)),
        "batch/samples": float(sum(len(m.sequence_lengths) for m in micro if any(m.mask))),
        "batch/microbatches": len(micro) / len(batches),
        "batch/fill": sum(sum(m.sequence_lengths) for m in micro) / (budget * len(micro)),
        **_routed(micro),
    }


def _routed(micro: Sequence[MicroBatch]) -> dict[str, float]:
    """Count the samples that the learner routes freely although others of the batch have a routing."""
    free, routed = 0, 0
    for each in micro:
        width = len(each.routing) // max(1, sum(each.sequence_lengths))
        starts = np.cumsum([0, *each.sequence_lengths])[:-1]
        known = sum(each.routing[start * width] != FREE for start in starts) if width else 0
        routed += known
        free += len(each.sequence_lengths) - known if any(each.mask) else 0
    return {"batch/unrouted": float(free)} if routed else {}


def of_queue(groups: Sequence[Group], depths: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Return the metrics that depend on when the work was done, which are therefore not in a manifest."""
    waits = [m.queue_s for group in groups for m in group.members if m.state == "done"]
    spools = {
        f"spool/{name}_{state}": float(n) for name, spool in depths.items() for state, n in spool.items()
    }
    return {**spools, "seconds/queue": _mean(waits)}


def turns_bin(turns: int) -> int:
    """Return the lower bound of the range of TURNS that contains a number of turns."""
    return max(first for first in TURNS if first <= turns)


def of_collected(counts: Mapping[str, int]) -> dict[str, float]:
    """Return failure rates of what was read since the last batch, including retried and dropped results.

    A rate without any result is left out.
    """
    values = {"grader/self_checks": float(counts["grader/self_checks"])}
    shares = [(f"infra/turns_{first}", f"read/turns_{first}") for first in TURNS]
    shares += [("grader/self_check_errors", "grader/self_checks")]
    shares += [(f"grader/{kind}", "grader/results") for kind in ("broke", "disagrees", "silent")]
    for name, of in shares:
        if counts[of]:
            values[name] = counts[name] / counts[of]
    return values


def _rewards(results: Sequence[ScoredEpisode]) -> list[float]:
    return [scored.score.reward or 0.0 for scored in results]


def _signal_rate(decisions: Sequence[GroupDecision]) -> float:
    """Return the share of groups with signal among those that were not dropped for their age."""
    return _mean([d.has_signal for d in decisions if d.status != "too_old"])


def _solved(results: Sequence[ScoredEpisode]) -> float:
    return _mean([scored.score.outcome == "resolved" for scored in results])


def _staleness(decided: Decided) -> dict[str, float]:
    episodes = [c for _, decision in decided if decision.status == "trained" for c in decision.episodes]
    ages = np.concatenate([np.zeros(0, np.int32), *(c.staleness for c in episodes)])
    return {
        "staleness/mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness/max": float(ages.max()) if len(ages) else 0.0,
        "episodes/untrained_turns": _mean([c.untrained_turns for c in episodes]),
    }


def _episodes(results: Sequence[ScoredEpisode]) -> dict[str, float]:
    episodes = [scored.episode for scored in results]
    exits = Counter(f"exit/{episode.exit_status.value}" for episode in episodes)
    outcomes = Counter(f"outcome/{scored.score.outcome}" for scored in results)
    stages = [episode.timing.stages for episode in episodes]
    return {
        "outcome/cheated": 0.0,  # always present, so that the curve shows the first one
        **{name: number / len(results) for name, number in sorted((exits + outcomes).items())},
        "episodes/samples": _mean([count_sequences(episode.turns) for episode in episodes]),
        **{f"recorder/{name}": _mean([e.counts.get(name, 0) for e in episodes]) for name in RECORDED},
        "episodes/turns": _mean([len(episode.turns) for episode in episodes]),
        "episodes/tokens": _mean([sampled_tokens(episode) for episode in episodes]),
        "seconds/sandbox": _mean([episode.timing.sandbox_s for episode in episodes]),
        "seconds/engine": _mean([episode.timing.engine_s for episode in episodes]),
        "seconds/engine_queue": _mean([each.queue_s for each in stages]),
        "seconds/prefill": _mean([each.prefill_s for each in stages]),
        "seconds/decode": _mean([each.decode_s for each in stages]),
        "episodes/prompt_tokens": _mean([each.prompt_tokens for each in stages]),
        "episodes/cached_tokens": _mean([each.cached_tokens for each in stages]),
        "seconds/tools": _mean([episode.timing.tools_s for episode in episodes]),
        "seconds/grading": _mean([scored.score.seconds for scored in results]),
        "grader/shared": _mean([scored.score.graded_as != "" for scored in results]),
        **of_engines(sum((each.engine for each in stages), EngineTime())),
    }


def of_engines(spent: EngineTime) -> dict[str, float]:
    """Return shares of the engines' time; none where engines do not say what they do."""
    whole = spent.prefill_s + spent.decode_s + spent.paused_s + spent.idle_s
    parts = msgspec.structs.asdict(spent).items() if whole else ()
    return {f"engines/{name.removesuffix('_s')}": seconds / whole for name, seconds in parts}


def _lengths(decided: Decided) -> dict[str, float]:
    """Return mean lengths that differ when long episodes are dropped or masked more often than short ones."""
    kinds = {
        "trained": [c.episode for _, d in decided if d.status == "trained" for c in d.episodes if c.tokens],
        "dropped": [s.episode for g, d in decided if d.status in ("too_few", "too_old") for s in g.results],
    }
    return {
        f"episodes/{kind}_tokens": fmean(map(sampled_tokens, found)) for kind, found in kinds.items() if found
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
