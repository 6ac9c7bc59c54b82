"""Render an episode as text for people: messages, tool calls and their output, the diff and the test results.

Policies and tools write arbitrary text, so control characters are escaped before a terminal can see them.
"""

import json
import re
from collections.abc import Iterator, Sequence

from hpc_swe.base.records import Message, ScoredEpisode, ToolCall

RULE = "=" * 100
MOST_TESTS = 50
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: str) -> str:
    """Escape all control characters of a text except tabs and newlines."""
    text = text.replace("\r\n", "\n")
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def title(scored: ScoredEpisode) -> str:
    """Return one line that says which episode this is and how it ended."""
    episode, score = scored.episode, scored.score
    reward = "no reward" if score.reward is None else f"reward {score.reward:g}"
    tokens = sum(len(turn.completion) for turn in episode.turns)
    found = [episode.request.name, episode.request.task_id, score.outcome, reward, episode.exit_status.value]
    found += [f"{len(episode.turns)} turns", f"{tokens} tokens", f"{episode.timing.total_s:.1f} s"]
    return clean(" | ".join(found))


def as_text(scored: ScoredEpisode) -> str:
    """Return the whole conversation, the submission and the test results."""
    episode, score = scored.episode, scored.score
    parts = [RULE, title(scored), RULE, *map(_message, episode.messages)]
    if episode.error:
        parts += ["--- error", clean(episode.error)]
    parts += ["--- submission", clean(episode.submission.rstrip("\n")) or "(nothing was changed)"]
    shared = f"; the score is that of {score.graded_as}, whose patch is equal" * bool(score.graded_as)
    tests = f"--- tests: {len(score.passed)} passed, {len(score.failed)} failed{shared}"
    parts += [tests, *_tests(score.failed)]
    return "\n".join([*parts, clean(score.detail)] if score.detail else parts) + "\n"


def _message(message: Message) -> str:
    calls = [line for call in message.tool_calls for line in _call(call)]
    content = [clean(message.content.rstrip("\n"))] if message.content.strip() else []
    return "\n".join([f"--- {message.role}", *content, *calls])


def _call(call: ToolCall) -> Iterator[str]:
    """Yield a tool call as its name and arguments; texts of several lines are indented, not quoted."""
    yield f">>> {clean(call.name)}"
    pairs = arguments(call)
    if pairs is None:
        yield f"    {clean(call.arguments)}"
    for key, text in pairs or []:
        indented = "\n        ".join(text.split("\n")) if "\n" in text else ""
        yield f"    {key}:" + (f"\n        {indented}" if indented else f" {text}")


def arguments(call: ToolCall) -> list[tuple[str, str]] | None:
    """Return the names and values of a call's arguments as text, or None when they are no JSON object."""
    try:
        found = json.loads(call.arguments or "{}")
        if not isinstance(found, dict):
            return None
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in found.items()}
    except (ValueError, RecursionError):  # a value can be nested too deeply for one of both
        return None
    return [(clean(key), clean(text)) for key, text in texts.items()]


def _tests(failed: Sequence[str]) -> list[str]:
    more = [f"  .. and {len(failed) - MOST_TESTS} more"] if len(failed) > MOST_TESTS else []
    return [*(f"  failed: {clean(name)}" for name in failed[:MOST_TESTS]), *more]
