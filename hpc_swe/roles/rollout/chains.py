"""Which earlier turn a request extends: chains of turns, found by comparing messages.

An agent sends its whole history each time. When the part up to its last answer equals a history that
a delivered reply ended, the request extends that turn. All else (a compressed history, an edited answer,
a side call) starts a chain, and a repeated request gets a sibling of the turn whose reply was lost.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from hpc_swe.records import Ids, Message, ToolCall, Turn


@dataclass(frozen=True)
class ChainPlace:
    """Where a request belongs."""

    parent: int | None
    new: list[Message]
    """Messages that no turn's prompt holds yet: all of them when a chain starts."""
    key: bytes
    """Of the whole history asked."""
    shows_tools: bool = False


class Chains:
    """The turns of an episode. Not thread-safe; the recorder locks."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._ends: dict[bytes, int] = {}
        self._digests: dict[int, tuple[Message, bytes]] = {}
        self._with_tools: set[int] = set()

    def place(self, messages: Sequence[Message], tools: str) -> ChainPlace:
        """The turn that the messages extend, if any. Other tools make another chain: prompts show them."""
        digests = self._digest_all(messages)
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        start = answers[-1] + 1 if answers else 0
        known = _fold(blake2b(tools.encode(), digest_size=16).digest(), digests[:start])
        key = _fold(known, digests[start:])
        parent = self._ends.get(known) if start < len(messages) else None
        return ChainPlace(parent, list(messages if parent is None else messages[start:]), key, bool(tools))

    def prefix(self, parent: int | None) -> list[Ids]:
        """All ids up to the end of a turn, in order, in pieces."""
        pieces = []
        while parent is not None:
            turn = self.turns[parent]
            pieces += [turn.completion_ids, turn.appended_ids]
            parent = turn.parent
        return pieces[::-1]

    def add(self, turn: Turn) -> int:
        """Keep a turn whose reply is still on its way."""
        self.turns.append(turn)
        return len(self.turns) - 1

    def main(self) -> int:
        """Where the agent's own conversation starts, whose work is graded; -1 when nothing was delivered.

        The first that shows tools, or where none does, the first of all. Before it only the program speaks;
        what the policy starts from the sandbox, however long it grows, comes after its first reply.
        """
        starts = [index for index, turn in enumerate(self.turns) if turn.parent is None and turn.delivered]
        return min(starts, key=lambda index: (index not in self._with_tools, index), default=-1)

    def deliver(self, index: int, place: ChainPlace, reply: Message) -> None:
        """The reply arrived: from now on requests may extend it."""
        self.turns[index] = msgspec.structs.replace(self.turns[index], delivered=True)
        self._ends[_fold(place.key, [_digest(reply)])] = index
        self._with_tools |= {index} if place.shows_tools else set()

    def retract(self, index: int) -> None:
        """The reply did not arrive; nothing extends its turn."""
        self.turns[index] = msgspec.structs.replace(self.turns[index], delivered=False)
        self._ends = {key: end for key, end in self._ends.items() if end != index}

    def _digest_all(self, messages: Sequence[Message]) -> list[bytes]:
        """Agents of this process send the same objects again; remembering the last request's is enough."""
        old = self._digests
        self._digests = {}
        for message in messages:
            kept = old.get(id(message))
            self._digests[id(message)] = kept if kept is not None else (message, _digest(message))
        return [self._digests[id(message)][1] for message in messages]


def _fold(key: bytes, digests: Sequence[bytes]) -> bytes:
    for digest in digests:
        key = blake2b(key + digest, digest_size=16).digest()
    return key


def _digest(message: Message) -> bytes:
    """Of what clients preserve: they trim text, drop thoughts, and write arguments with other spaces."""
    content = message.content
    if message.role == "assistant":
        content = content.rpartition("</think>")[2]
    calls = [(call.name, _canonical(call)) for call in message.tool_calls]
    return blake2b(msgspec.json.encode((message.role, content.strip(), calls)), digest_size=16).digest()


def _canonical(call: ToolCall) -> object:
    try:
        return json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return call.arguments
