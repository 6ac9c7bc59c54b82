"""Find what was trained of each episode: its advantage, and the tokens with a loss.

A run keeps its batches only for a while, and its archive for ever. So the run's own rule is applied to the
archive again: the same function that made the batch, with the run's configuration.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_swe.base.records import ScoredEpisode
from hpc_swe.roles.coordinator.batching import batches
from hpc_swe.roles.coordinator.batching.batches import BatchSettings
from hpc_swe.roles.coordinator.batching.groups import Group, failure_cause
from hpc_swe.roles.coordinator.batching.samples import EpisodeSamples, leaf_chains, trained_turns
from hpc_swe.roles.coordinator.modes.replay import as_member

WHY = {
    "no_signal": "all advantages of its group are 0",
    "too_few": "fewer than two episodes of its group are usable",
    "too_old": "a token of its group is older than groups.max_staleness allows",
}
"""Decision about a group -> why its episodes were not trained."""


@dataclass(frozen=True)
class Use:
    """A use says what a batch did with one episode."""

    reason: str = ""
    """Why nothing of it was trained; empty when something was."""
    advantage: float | None = None
    """Its advantage; None when it got none."""
    masks: Sequence[NDArray[np.bool_]] = ()
    """For each turn, which of its sampled tokens had a loss; empty when none of the episode had."""


class BatchRule:
    """The rule of a run decides about the groups of its batches as its coordinator did."""

    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings

    def uses(self, members: Sequence[ScoredEpisode], step: int, was_trained: bool) -> list[Use]:
        """Return what batch `step` did with each member of a group.

        The archive says whether the group `was_trained`.
        """
        request = members[0].episode.request
        group = Group((request.split, request.group_id), [as_member(scored) for scored in members])
        decision = batches.decide(group, step, self._settings)
        found = {made.episode.request.index: made for made in decision.episodes}
        return [
            self._use(scored, found.get(scored.episode.request.index), decision.status, was_trained)
            for scored in members
        ]

    def _use(self, scored: ScoredEpisode, made: EpisodeSamples | None, status: str, was_trained: bool) -> Use:
        failure = failure_cause(scored)
        if failure:
            return Use(f"it is no result: {failure}")
        if self._settings.batches.overlong != "train" and scored.episode.exit_status.is_overlong:
            return Use("it was cut off, and batches.overlong leaves such episodes out")
        if made is None:
            return Use(WHY[status])
        if not was_trained:
            return Use("the archive says that its group was not trained", made.advantage)
        if not made.tokens:
            return Use("it has no token with a loss", made.advantage)
        return Use("", made.advantage, self._masks(made))

    def _masks(self, made: EpisodeSamples) -> list[NDArray[np.bool_]]:
        """Cut the masks of an episode's samples at its turns; a turn before a fork is in several samples."""
        episode, chains = made.episode, self._settings.batches.train_chains
        found = [np.zeros(len(turn.completion), np.bool_) for turn in episode.turns]
        trained = trained_turns(episode.turns, chains, episode.main)
        for path, sample in zip(leaf_chains(episode.turns, trained), made.samples, strict=True):
            at = 0
            for index in path:
                at += len(episode.turns[index].appended_ids) // 4
                end = at + len(found[index])
                found[index] |= sample.mask_array[at:end].astype(np.bool_)
                at = end
        return found
