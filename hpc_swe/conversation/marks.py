"""What a completion spells, and which of the marks in it count."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OPEN, CLOSE, THINK, THOUGHT = "<tool_call>", "</tool_call>", "<think>", "</think>"


class Malformed(ValueError):
    """The text is no tool call; says why."""


@dataclass(frozen=True)
class Said:
    """What a completion spells, and where in it each control token of the tokenizer stands, if anywhere."""

    text: str
    control: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def find(self, mark: str, start: int) -> int:
        """Where the next mark is; -1 when there is none."""
        places = self.control.get(mark)
        if places is not None and any(self.control.get(name) for name in (OPEN, CLOSE, THINK, THOUGHT)):
            return next(iter(places[bisect_left(places, start) :]), -1)
        return self.text.find(mark, start)

    def skip(self, at: int) -> int:
        """The place of the next character that is no white space."""
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at
