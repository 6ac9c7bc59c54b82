"""Small episodes for the tests of the coordinator."""

import numpy as np

from hpc_swe.base import records
from hpc_swe.base.records import (
    Episode,
    ExitStatus,
    RolloutRequest,
    Sampling,
    Score,
    ScoredEpisode,
    Timing,
    Turn,
    VersionSpan,
    WeightVersion,
)


def turn(parent, appended, completion, step=0, delivered=True):
    """`appended` and `completion` are lists of ids; one version span."""
    version = WeightVersion(step=step)
    return Turn(
        parent=parent,
        appended_ids=records.ids(appended),
        completion_ids=records.ids(completion),
        logprobs=records.floats([-0.5 - i / 8 for i in range(len(completion))]),
        spans=[VersionSpan(start=0, end=len(completion), oldest=version, newest=version)],
        sampling=Sampling(),
        engine="e",
        finish_reason="stop",
        delivered=delivered,
        seconds=1.0,
    )


def episode(turns, group=0, index=0, status=ExitStatus.SUBMITTED, attempt=0):
    request = RolloutRequest(
        group_id=group, index=index, task_id="t", seed=1, sampling=Sampling(), attempt=attempt
    )
    return Episode(
        request=request,
        turns=turns,
        messages=[],
        exit_status=status,
        submission="",
        timing=Timing(sandbox_s=1, engine_s=2, tools_s=3, total_s=7),
        worker="w",
    )


def scored(reward=1.0, group=0, index=0, length=3, **options):
    """An episode of one turn of `length` sampled tokens; reward None is an infrastructure failure."""
    step = options.pop("step", 0)
    made = episode([turn(None, [1, 2], list(range(10, 10 + length)), step)], group, index, **options)
    outcome = "infra_error" if reward is None else "resolved" if reward > 0 else "unresolved"
    return ScoredEpisode(episode=made, score=Score(outcome=outcome, reward=reward, seconds=0.5))


def trained_ids(sample):
    return records.id_array(sample.token_ids)[sample.mask_array.astype(bool)].tolist()


def array(data):
    return np.frombuffer(data, "<f4")
