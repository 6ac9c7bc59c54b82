"""Find the earlier turn that a request extends, by comparing messages; turns form chains.

An agent sends its whole history each time. If the part up to the last answer equals a history that ended in
a delivered reply, the request extends that reply's turn. Any other (with a compressed history, an edited
answer, or a side request) starts a chain, and a repeated one is a sibling of the turn whose reply was lost.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from hpc_swe.base.records import Ids, Message, ToolCall, Turn


@dataclass(frozen=True)
class ChainPlace:
    """Say which turn a request extends and with which messages."""

    parent: int | None
    """Index of the extended turn; None when the request starts a chain."""
    new: list[Message]
    """Messages that are in no turn's prompt yet: all of them when a chain starts."""
    key: bytes
    """Digest of the request's whole history and tools."""
    tools: str = ""
    """Digest of the tools that the request shows; empty when it shows none."""


class Chains:
    """Keep the turns of an episode. It is not thread-safe; the recorder holds a lock."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.salts: list[str] = []
        """Of each turn: the salt of the caches that its chain has in an engine."""
        self._ends: dict[bytes, int] = {}
        """Digest of a history that ended in a delivered reply -> its turn."""
        self._digests: dict[int, tuple[Message, bytes]] = {}
        """Object id -> message and digest, for the last request's messages."""
        self._with_tools: set[int] = set()

    def place(self, messages: Sequence[Message], tools: str) -> ChainPlace:
        """Find the turn that the messages extend, if any; with other tools, prompts differ from the start."""
        digests = self._digest_all(messages)
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        start = answers[-1] + 1 if answers else 0
        known = _fold(blake2b(tools.encode(), digest_size=16).digest(), digests[:start])
        key = _fold(known, digests[start:])
        shown = blake2b(tools.encode(), digest_size=4).hexdigest() if tools else ""
        parent = self._ends.get(known) if start < len(messages) else None
        return ChainPlace(parent, list(messages if parent is None else messages[start:]), key, shown)

    def prefix(self, parent: int | None) -> list[Ids]:
        """Return all ids up to the end of a turn, in order, in pieces."""
        pieces = []
        while parent is not None:
            turn = self.turns[parent]
            pieces += [turn.completion_ids, turn.appended_ids]
            parent = turn.parent
        return pieces[::-1]

    def add(self, turn: Turn, salt: str) -> int:
        """Add a turn whose reply is not delivered yet; return its index."""
        self.turns.append(turn)
        self.salts.append(salt)
        return len(self.turns) - 1

    def main(self) -> int:
        """Return the turn that starts the agent's own conversation, the graded one; -1 if none was delivered.

        It is the first chain that shows tools, or the first of all when none does. Before it only the agent
        program makes requests; any chain that the policy starts from the sandbox comes after its first reply.
        """
        starts = [index for index, turn in enumerate(self.turns) if turn.parent is None and turn.delivered]
        return min(starts, key=lambda index: (index not in self._with_tools, index), default=-1)

    def deliver(self, index: int, place: ChainPlace, reply: Message) -> None:
        """Mark a reply as delivered, so that later requests may extend its turn."""
        self.turns[index] = msgspec.structs.replace(self.turns[index], delivered=True)
        self._ends[_fold(place.key, [_digest(reply)])] = index
        self._with_tools |= {index} if place.tools else set()

    def retract(self, index: int) -> None:
        """Mark a reply as not delivered, so that no request extends its turn."""
        self.turns[index] = msgspec.structs.replace(self.turns[index], delivered=False)
        self._ends = {key: end for key, end in self._ends.items() if end != index}

    def _digest_all(self, messages: Sequence[Message]) -> list[bytes]:
        """Hash each message, or reuse its digest: agents of this process resend the same objects."""
        old, self._digests = self._digests, {}
        for message in messages:
            self._digests[id(message)] = old.get(id(message)) or (message, _digest(message))
        return [self._digests[id(message)][1] for message in messages]


def _fold(key: bytes, digests: Sequence[bytes]) -> bytes:
    for digest in digests:
        key = blake2b(key + digest, digest_size=16).digest()
    return key


def _digest(message: Message) -> bytes:
    """Hash what clients preserve of a message: they trim text, drop thoughts and reformat arguments."""
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
