"""Find the marks of tool calls and thoughts in a completion, and tell them from quoted ones."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OPEN, CLOSE, THINK, THOUGHT = "<tool_call>", "</tool_call>", "<think>", "</think>"


class Malformed(ValueError):
    """The text is not a valid tool call; the message says why, to the policy."""


@dataclass(frozen=True)
class CompletionText:
    """Hold a completion's text and the places of its control tokens."""

    text: str
    control: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Name of a control token -> ascending places in `text` where it was sampled as that token."""

    def find(self, mark: str, start: int) -> int:
        """Return the place of the next mark at or after `start`; -1 when there is none.

        If any mark was sampled as a control token, only control tokens count; else spelled marks count too.
        """
        places = self.control.get(mark)
        if places is not None and any(self.control.get(name) for name in (OPEN, CLOSE, THINK, THOUGHT)):
            return next(iter(places[bisect_left(places, start) :]), -1)
        return self.text.find(mark, start)

    def skip(self, at: int) -> int:
        """Return the place of the next character that is not white space."""
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at
