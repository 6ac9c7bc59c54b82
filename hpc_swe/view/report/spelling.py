"""Spell token ids one by one, as the model's tokenizer does."""

from collections.abc import Sequence
from pathlib import Path

from hpc_swe.agents.chat.tokens import Tokens
from hpc_swe.base.transcript import clean

UNFINISHED = "\ufffd"  # stands in decoded text for bytes that are no whole character
MOST_BYTES = 4
"""Bytes of the longest character in UTF-8, each of which may be a token of its own."""


class Speller:
    """A speller decodes each id once and remembers the result."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer of a model's folder.

        Raise ConfigError if the tokenizer is missing or cannot be used.
        """
        self._tokens = Tokens(folder)
        self._whole: dict[int, str] = {}
        self._partial: set[int] = set()
        """Ids that begin or end within a character."""

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence, with control tokens spelled out."""
        return clean(self._tokens.decode(ids))

    def words(self, ids: Sequence[int]) -> tuple[dict[int, str], dict[int, str]]:
        """Return id -> text for all ids that have a text alone, and position -> text for the others."""
        for each in {*ids} - self._whole.keys() - self._partial:
            text = self._tokens.decode([each])
            if UNFINISHED in text:
                self._partial.add(each)
            else:
                self._whole[each] = _visible(text)
        parts = self._partial.intersection(ids)
        return {each: self._whole[each] for each in {*ids} - parts}, self._joined(ids) if parts else {}

    def _joined(self, ids: Sequence[int]) -> dict[int, str]:
        """Join neighbours to whole characters; the first has the text, the others an empty one."""
        found: dict[int, str] = {}
        at = 0
        while at < len(ids):
            size = 1
            if ids[at] in self._partial:
                sizes = range(2, MOST_BYTES + 1)
                whole = (n for n in sizes if UNFINISHED not in self._tokens.decode(ids[at : at + n]))
                size = next(whole, 1)
                found |= dict.fromkeys(range(at + 1, min(at + size, len(ids))), "")
                found[at] = _visible(self._tokens.decode(ids[at : at + size]))
            at += size
        return found


def _visible(text: str) -> str:
    return clean(text.replace("\r", r"\x0d"))
