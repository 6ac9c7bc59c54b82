"""Shape the rewards of a group before its advantages are computed.

    shaped = reward - length - turns

length is the soft overlong punishment (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 13): with n sampled tokens
in the episode it is 0 up to `overlong_from`, grows linearly, and is `overlong_penalty` from `overlong_to` on.
It says that a long episode is worse before a limit cuts it off, also among episodes that all failed.

Both count delivered turns only. A reply that was lost with its connection is no choice of the policy.

turns is `turn_penalty` times the turns of the episode, as in debug-gym's reward with a cost per step. It is
taken from resolved episodes only: where nothing is resolved, it would reward those that give up first.
"""

from hpc_swe.records import ScoredEpisode
from hpc_swe.settings import ShapingConfig


def shaped(scored: ScoredEpisode, config: ShapingConfig) -> float:
    """Return the reward from which the advantage of an episode is computed."""
    turns = [turn for turn in scored.episode.turns if turn.delivered]
    penalty = overlong(sum(len(turn.completion) for turn in turns), config)
    if scored.score.outcome == "resolved":
        penalty += config.turn_penalty * len(turns)
    return (scored.score.reward or 0.0) - penalty


def overlong(tokens: int, config: ShapingConfig) -> float:
    """Return the penalty of an episode's length."""
    if not config.overlong_from or tokens <= config.overlong_from:
        return 0.0
    share = (tokens - config.overlong_from) / (config.overlong_to - config.overlong_from)
    return config.overlong_penalty * min(1.0, share)
