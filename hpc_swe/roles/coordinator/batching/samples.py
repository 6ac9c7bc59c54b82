"""Cut an episode into samples: one per leaf of the tree of turns, each sampled token trained at most once.

A chain is a conversation: all turns that descend from one turn without a parent. Where its prompts fork, the
turns before the fork are in several samples, but are trained only in the first of them:

    turns   0 <- 1 <- 2          samples   [0 1 2]
                 1 <- 3                    [. . 3]   dots: context, mask 0

A turn is trained when its reply was delivered and the conversation continued from it, or when it is the last
delivered turn of its chain. Replies that an agent sampled and then discarded did not affect what was graded.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from hpc_swe.base import records
from hpc_swe.base.records import Episode, Sample, Turn

Chains = Literal["main", "tools", "all"]


@dataclass(frozen=True)
class EpisodeSamples:
    """Hold one episode, cut into samples for one step."""

    episode: Episode
    samples: list[Sample]
    advantage: float
    tokens: int
    """Number of trained tokens."""
    staleness: NDArray[np.int32]
    """Staleness in steps of every trained token."""
    untrained_turns: int


def sampled_tokens(episode: Episode) -> int:
    """Return the number of tokens that the engine sampled for an episode."""
    return sum(len(turn.completion) for turn in episode.turns)


def find_flaw(episode: Episode, routing_bytes: int | None = None) -> str:
    """Return what makes an episode's tokens unusable; empty when nothing does.

    `routing_bytes` are those of one token in the model that is trained; None accepts any number.
    """
    for index, turn in enumerate(episode.turns):
        length, logprobs = len(turn.completion), records.float_array(turn.logprobs)
        edges = [edge for span in turn.spans for edge in (span.start, span.end)]
        if len(logprobs) != length or not np.isfinite(logprobs).all():
            return f"turn {index}: {length} ids, {len(logprobs)} log-probabilities, or not all finite"
        if turn.parent is not None and not 0 <= turn.parent < index:
            return f"turn {index}: its parent {turn.parent} does not come before it"
        if edges[1:-1:2] != edges[2::2] or (length and (not edges or (edges[0], edges[-1]) != (0, length))):
            return f"turn {index}: version spans {edges} do not cover {length} ids"
        if len(turn.routing) % _routed_tokens(turn):
            return f"turn {index}: a routing of {len(turn.routing)} bytes for {_routed_tokens(turn)} tokens"
    widths = {len(turn.routing) // _routed_tokens(turn) for turn in episode.turns if turn.routing}
    if len(widths) > 1:
        return "the routings of its turns are of models with different numbers of layers or experts"
    if routing_bytes is not None and widths - {routing_bytes}:
        return f"the engine returned {max(widths)} experts of a token in all layers, not {routing_bytes}"
    return ""


def _routed_tokens(turn: Turn) -> int:
    count = len(turn.appended_ids) // 4 + len(turn.completion)
    return max(1, count - (turn.parent is None))


def trained_turns(turns: Sequence[Turn], chains: Chains, main: int = -1) -> list[int]:
    """Return the turns with a loss; `main` is the first turn of the chain that ``main`` trains.

    When it is negative, that is the first chain with more than one turn, or else the first chain. With
    ``tools`` all chains that show the tools of this one are trained: those of a history that was rewritten.
    """
    root: list[int] = []
    for index, turn in enumerate(turns):
        root.append(index if turn.parent is None else root[turn.parent])
    delivered = [index for index, turn in enumerate(turns) if turn.delivered]
    last = {root[index]: index for index in delivered}
    extended = {turn.parent for turn in turns}
    sizes = Counter(root[index] for index in delivered)
    if main < 0:
        main = min(sizes, key=lambda chain: (sizes[chain] == 1, chain), default=-1)
    shown = turns[main].tools if chains == "tools" and delivered else ""
    own = {
        chain
        for chain in sizes
        if chains == "all" or chain == main or (shown and turns[chain].tools == shown)
    }
    return [
        index
        for index in delivered
        if (index in extended or last[root[index]] == index) and root[index] in own
    ]


def path_to(turns: Sequence[Turn], leaf: int) -> list[int]:
    """Return the turns from the start of the chain to `leaf`."""
    path: list[int] = []
    index: int | None = leaf
    while index is not None:
        path.append(index)
        index = turns[index].parent
    return path[::-1]


def leaf_chains(turns: Sequence[Turn], trained: Sequence[int]) -> list[list[int]]:
    """Return the paths from a first turn to each trained turn that no other trained turn descends from."""
    covered: set[int] = set()
    paths = []
    for index in sorted(trained, reverse=True):
        if index not in covered:
            paths.append(path_to(turns, index))
            covered.update(paths[-1])
    return paths[::-1]


def count_sequences(turns: Sequence[Turn]) -> int:
    """Count an episode's token sequences, trained or not; it is 1 when each prompt extends the one before."""
    return len(leaf_chains(turns, trained_turns(turns, "all")))


def make_samples(episode: Episode, advantage: float, chains: Chains, step: int) -> EpisodeSamples:
    """Cut an episode for batch `step`."""
    trained = trained_turns(episode.turns, chains, episode.main)
    remaining = set(trained)
    samples, ages = [], []
    for path in leaf_chains(episode.turns, trained):
        ids, logprobs, versions = _concatenate(episode.turns, path, remaining)
        sampled = versions >= 0
        ages.append(step - versions[sampled])
        samples.append(build_sample(episode.request.name, ids, (logprobs, versions), sampled, advantage))
        remaining -= set(path)
    ages_all = np.concatenate(ages) if ages else np.zeros(0, np.int32)
    untrained = len(episode.turns) - len(trained)
    return EpisodeSamples(episode, samples, advantage, len(ages_all), ages_all, untrained)


def drop_routing(episode: Episode) -> Episode:
    """Return the episode without its routing, which is much larger than all the rest."""
    return replace(episode, turns=[replace(t, routing=b"") if t.routing else t for t in episode.turns])


def add_routing(found: EpisodeSamples, episode: Episode, chains: Chains) -> EpisodeSamples:
    """Return samples that were made without routing with that of the whole `episode`."""
    turns = episode.turns
    paths = leaf_chains(turns, trained_turns(turns, chains, episode.main))
    routings = [_routing([turns[index] for index in path]) for path in paths]
    pairs = zip(found.samples, routings, strict=True)
    return dataclasses.replace(found, samples=[replace(each, routing=own) for each, own in pairs])


def _concatenate(
    turns: Sequence[Turn], path: Sequence[int], trained: set[int]
) -> tuple[records.IdArray, records.FloatArray, records.IdArray]:
    """Join ids, log-probabilities and versions of a path; the last two are 0 and -1 outside trained turns."""
    ids: list[NDArray[np.int32]] = []
    logprobs: list[NDArray[np.float32]] = []
    versions: list[NDArray[np.int32]] = []
    for index in path:
        turn = turns[index]
        appended, length = records.id_array(turn.appended_ids), len(turn.completion)
        ids += [appended, turn.completion]
        blank = len(appended) + (0 if index in trained else length)
        logprobs.append(np.zeros(blank, np.float32))
        versions.append(np.full(blank, -1, np.int32))
        if index in trained:
            logprobs.append(records.float_array(turn.logprobs))
            versions += [np.full(span.end - span.start, span.fewest_steps, np.int32) for span in turn.spans]
    return np.concatenate(ids), np.concatenate(logprobs), np.concatenate(versions)


def _routing(turns: Sequence[Turn]) -> bytes:
    """Join the routings of a chain, of which the last token was never computed; empty if one has none."""
    if not all(turn.routing for turn in turns):
        return b""
    width = len(turns[0].routing) // _routed_tokens(turns[0])
    return b"".join([turn.routing for turn in turns]) + bytes([records.FREE]) * width


def build_sample(
    name: str,
    ids: records.IdArray,
    sampled: tuple[records.FloatArray, records.IdArray],
    mask: NDArray[np.bool_],
    advantage: float,
) -> Sample:
    """Build a sample; `sampled` are log-probabilities and versions, which count where `mask` is true."""
    return Sample(
        episode=name,
        token_ids=records.ids(ids),
        mask=mask.astype(np.uint8).tobytes(),
        logprobs=records.floats(np.where(mask, sampled[0], np.float32(0))),
        advantages=records.floats(np.where(mask, np.float32(advantage), np.float32(0))),
        versions=records.ids(np.where(mask, sampled[1], np.int32(-1))),
    )
