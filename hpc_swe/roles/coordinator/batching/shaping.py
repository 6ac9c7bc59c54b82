"""Compute what [shaping] takes from the advantages of a group.

    penalty   = length + turns
    advantage = estimate from the rewards alone - (penalty - mean penalty of the group)

An estimator may divide by the spread of a group, or by its mean. A penalty inside would make the spread that
it is divided by: where all are resolved and one took one more turn, that turn would count as much as a
failure does elsewhere. So rewards alone decide whether a group has signal, and how it is scaled.

length is the soft overlong punishment (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 13): with n sampled tokens
in the episode it is 0 up to `overlong_from`, grows linearly, and is `overlong_penalty` from `overlong_to` on.
It says that a long episode is worse before a limit cuts it off, also among the failures of a group.

Both count delivered turns only. A reply that was lost with its connection is no choice of the policy.

turns is `turn_penalty` times the turns of the episode, as in debug-gym's reward with a cost per step. It is
taken from resolved episodes only: where nothing is resolved, it would reward those that give up first.
"""

from hpc_swe.base.records import ScoredEpisode
from hpc_swe.config.settings import ShapingConfig


def penalty(scored: ScoredEpisode, config: ShapingConfig) -> float:
    """Return what is taken from an episode for its length and its turns."""
    turns = [turn for turn in scored.episode.turns if turn.delivered]
    length = overlong(sum(len(turn.completion) for turn in turns), config)
    return length + (config.turn_penalty * len(turns) if scored.score.outcome == "resolved" else 0.0)


def overlong(tokens: int, config: ShapingConfig) -> float:
    """Return the penalty of an episode's length."""
    if not config.overlong_from or tokens <= config.overlong_from:
        return 0.0
    share = (tokens - config.overlong_from) / (config.overlong_to - config.overlong_from)
    return config.overlong_penalty * min(1.0, share)
