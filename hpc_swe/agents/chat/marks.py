"""Find the marks of tool calls and thoughts in a completion, and tell them from quoted ones."""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

OPEN, CLOSE, THINK, THOUGHT = "<tool_call>", "</tool_call>", "<think>", "</think>"
TOOL_CALLS = "[TOOL_CALLS]"


class Malformed(ValueError):
    """The text is not a valid tool call; the message says why, to the policy."""


@dataclass(frozen=True)
class CompletionText:
    """Hold a completion's text and the places of its control tokens."""

    text: str
    control: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Name of a control token -> ascending places in `text` where it was sampled as that token."""

    def find(self, mark: str, start: int) -> int:
        """Return the place of the next mark at or after `start`; -1 when there is none."""
        places = self._places[mark]
        index = bisect_left(places, start)
        return places[index] if index < len(places) else -1

    @cached_property
    def _places(self) -> dict[str, Sequence[int]]:
        """Map each mark to its ascending places.

        If any mark was sampled as a control token, only control tokens count; else spelled marks count too.
        """
        marks = (OPEN, CLOSE, THINK, THOUGHT, TOOL_CALLS)
        tokens = self.control if any(self.control.get(mark) for mark in marks) else {}
        spelled = {mark: [m.start() for m in re.finditer(re.escape(mark), self.text)] for mark in marks}
        return spelled | {mark: tokens[mark] for mark in marks if mark in tokens}

    def skip(self, at: int) -> int:
        """Return the place of the next character that is not white space."""
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at
