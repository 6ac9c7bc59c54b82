"""Turn one scored episode into what the page shows: messages, turns with their tokens, reward and tests."""

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from hpc_swe.base.records import Episode, Message, ScoredEpisode, Timing, Turn, float_array, id_array
from hpc_swe.base.transcript import arguments, clean
from hpc_swe.roles.coordinator.batching.samples import find_flaw, path_to, trained_turns
from hpc_swe.view.report.spelling import Speller
from hpc_swe.view.report.training import Use

SCALE = 1000
"""Log-probabilities are whole multiples of 1 / SCALE, which makes the files a third smaller."""
Data = dict[str, object]


def whole(scored: ScoredEpisode, use: Use, speller: Speller | None) -> Data:
    """Return one episode; without a speller its tokens are ids only."""
    episode, score, request = _sound(scored.episode), scored.score, scored.episode.request
    words: dict[int, str] = {}
    pairs = answered(episode)
    turns = [
        _turn(episode, index, use, speller, words) | {"answer": pairs.get(index)}
        for index in range(len(episode.turns))
    ]
    return {
        "name": request.name,
        "task": clean(request.task_id),
        "seed": request.seed,
        "attempt": request.attempt,
        "sampling": msgspec.to_builtins(request.sampling),
        "outcome": score.outcome,
        "reward": score.reward,
        "exit": episode.exit_status.value,
        "error": clean(episode.error),
        "detail": clean(score.detail),
        "passed": [clean(name) for name in score.passed],
        "failed": [clean(name) for name in score.failed],
        "submission": clean(episode.submission),
        "seconds": [*_seconds(episode.timing), ("grading_s", score.seconds)],
        "counts": sorted((clean(name), count) for name, count in episode.counts.items()),
        "worker": clean(episode.worker),
        "self_checks": [clean(fault) for fault in scored.self_checks],
        "untrained": clean(use.reason),
        "advantage": use.advantage,
        "messages": [_message(message) for message in episode.messages],
        "turns": turns,
        "words": words,
    }


def _seconds(timing: Timing) -> list[tuple[str, float]]:
    """Return the parts of an episode's time, those in the stages of engines too."""
    parts = msgspec.to_builtins(timing)
    return [(name, value) for name, value in (parts | parts.pop("stages")).items() if name.endswith("_s")]


def _sound(episode: Episode) -> Episode:
    """Return the episode; where its turns are flawed, with each of them as a chain of its own."""
    if not find_flaw(episode):
        return episode
    return replace(episode, turns=[replace(turn, parent=None) for turn in episode.turns])


def answered(episode: Episode) -> dict[int, int]:
    """Return turn -> the message that it answered with; empty when turns and messages do not agree.

    The messages are the history of the graded conversation. Its turns are the path to its last reply; where
    every prompt was rendered anew, they are all delivered turns in their order.
    """
    answers = [number for number, message in enumerate(episode.messages) if message.role == "assistant"]
    delivered = [index for index, turn in enumerate(episode.turns) if turn.delivered]
    main = trained_turns(episode.turns, "main", episode.main)
    for path in (path_to(episode.turns, main[-1]) if main else [], delivered):
        if len(path) == len(answers):
            return dict(zip(path, answers, strict=True))
    return {}


def _turn(episode: Episode, index: int, use: Use, speller: Speller | None, words: dict[int, str]) -> Data:
    """Return one turn; the texts of its ids are entered into `words`."""
    turn = episode.turns[index]
    ids, odd = turn.completion.tolist(), dict[int, str]()
    appended = id_array(turn.appended_ids).tolist()
    if speller is not None:
        found, odd = speller.words(ids)
        words |= found
    return {
        "parent": turn.parent,
        "chain": path_to(episode.turns, index)[0],
        "delivered": turn.delivered,
        "finish": turn.finish_reason,
        "seconds": turn.seconds,
        "engine": clean(turn.engine),
        "read": len(appended),
        "prompt": speller.text(appended) if speller else "",
        "ids": ids,
        "logprobs": _scaled(turn),
        "odd": odd,
        "versions": [[s.start, s.end, s.oldest.name, s.newest.name] for s in turn.spans],
        "trained": runs(use.masks[index]) if use.masks else [],
    }


def _scaled(turn: Turn) -> list[float]:
    """Return log-probabilities in units of 1 / SCALE, whole numbers unless one is not finite."""
    scaled = np.rint(float_array(turn.logprobs).astype(np.float64) * SCALE)
    values: list[float] = (scaled.astype(np.int64) if np.isfinite(scaled).all() else scaled).tolist()
    return values


def runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the intervals [start, end) in which a mask is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(start, end) for start, end in edges.reshape(-1, 2).tolist()]


def _message(message: Message) -> list[object]:
    """Return role, text and calls; arguments that are no JSON object stand under an empty name."""
    calls = [
        [clean(call.name), arguments(call) or [("", clean(call.arguments))]] for call in message.tool_calls
    ]
    return [message.role, clean(message.content), calls]
