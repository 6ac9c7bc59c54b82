"""Use a model's tokenizer so that text never becomes a control token.

Control tokens are the tokenizer's added tokens (turn marks, tool-call marks). Only the chat template's
own text may contain them; all other text goes through a copy of the tokenizer that does not know them.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from hpc_swe.base.errors import ConfigError, boundary

PARTS = ("normalizer", "pre_tokenizer", "decoder")


class Tokens:
    """Encode and decode text, without any state of a conversation."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tokenizer.json"
        with boundary(ConfigError, f"{self._path} is no tokenizer that can be read; copy it again"):
            spec = json.loads(self._path.read_text(encoding="utf-8"))
            added = {token["content"]: int(token["id"]) for token in spec["added_tokens"]}
        plain = dict.fromkeys(PARTS) | _without_control(spec)
        inner = plain | {part: _without_prefix(plain[part]) for part in PARTS}
        self._full = Tokenizer.from_str(json.dumps(spec | {"decoder": inner["decoder"]}))
        self._inner = Tokenizer.from_str(json.dumps(inner))
        """For text that continues other text; SentencePiece's tokenizers put a space before the others."""
        has_prefix = inner != plain and not _prefixes_first(spec)
        self._plain = Tokenizer.from_str(json.dumps(plain)) if has_prefix else self._inner
        self.control: dict[str, int] = added
        self._names = {number: name for name, number in added.items()}
        # Longest first, as the tokenizer matches them: <|im_end|>x before <|im_end|>.
        names = sorted(added, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})" if names else r"(?!)()")
        self._check()

    @cached_property
    def digest(self) -> str:
        """Return a digest of what each id means; two tokenizers with the same one can exchange ids."""
        words = json.dumps([sorted(self._full.get_vocab().items()), sorted(self.control.items())])
        return hashlib.sha256(words.encode()).hexdigest()

    @property
    def largest_plain_id(self) -> int:
        """Return the largest id that text may become."""
        return max(self._plain.get_vocab().values())

    def encode(self, text: str) -> list[int]:
        """Encode text that is not the template's; the ids contain no control token."""
        return self._encode([text], inner=False)

    def _encode(self, texts: Iterable[str], *, inner: bool) -> list[int]:
        tokenizer = self._inner if inner else self._plain
        return list(tokenizer.encode(_encodable("".join(texts)), add_special_tokens=False).ids)

    def encode_parts(self, parts: Iterable[tuple[str, bool]], *, continues: bool = False) -> list[int]:
        """Encode adjacent texts; control tokens count only in those flagged True, the template's.

        Text between two control tokens is encoded as one piece, whoever wrote it, as in the model's training.
        With `continues`, other text comes before.
        """
        ids: list[int] = []
        run: list[str] = []
        for text, is_template in parts:
            for index, piece in enumerate(self._split.split(text) if is_template else [text]):
                if index % 2 == 0:
                    run.append(piece)
                    continue
                ids += self._encode(run, inner=continues and not ids)
                ids.append(self.control[piece])
                run.clear()
        return ids + self._encode(run, inner=continues and not ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text, with control tokens spelled out."""
        return _decode(self._full, ids)

    def spell(self, ids: Iterable[int], *, continues: bool = False) -> tuple[str, dict[str, list[int]]]:
        """Decode ids to text; return it with the places where each control token was a token, not spelled.

        With `continues`, other text comes before.
        """
        pieces: list[str] = []
        places: dict[str, list[int]] = {name: [] for name in self.control}
        length = 0
        for is_control, group in itertools.groupby(ids, self._names.__contains__):
            tokenizer = self._inner if continues and not pieces else self._plain
            for name in map(self._names.__getitem__, group) if is_control else [_decode(tokenizer, group)]:
                if is_control:
                    places[name].append(length)
                pieces.append(name)
                length += len(name)
        return "".join(pieces), places

    def encode_whole(self, text: str) -> list[int]:
        """Encode text as other programs do, with control tokens wherever they are spelled."""
        return list(self._full.encode(text, add_special_tokens=False).ids)

    def _check(self) -> None:
        text = "".join(f"a {name} b{name}" for name in self.control)
        for token in {*self.control.values()} & {*self.encode(text)}:
            raise ConfigError(f"{self._path}: plain text can become control token {token}")
        sample = "def f(X):\n\treturn  {'\u00e9 e\u0301 \ufb01': X}\n"
        ids = self.encode_parts([(f" {sample}", False)], continues=True)
        if self.spell(self.encode(sample))[0] != sample or self.spell(ids, continues=True)[0] != f" {sample}":
            raise ConfigError(
                f"{self._path}: text changes when it is encoded and decoded; use a byte-level tokenizer"
            )


def _without_control(spec: dict[str, object]) -> dict[str, object]:
    plain = spec | {"added_tokens": [], "post_processor": None}
    if _composes(plain.get("normalizer")):
        # Decomposed letters of a file must reach the policy unchanged, or its edits would not match the file.
        plain["normalizer"] = None
    return plain


def _without_prefix(part: object) -> object:
    """Leave out of a part of a tokenizer what adds a space before a text, or takes one away."""
    if not isinstance(part, dict):
        return part
    for key in ("normalizers", "pretokenizers", "decoders"):
        if key in part:
            kept = (_without_prefix(each) for each in part[key])
            return part | {key: [each for each in kept if each is not None]}
    kind = part.get("type")
    if kind == "Metaspace":
        return part | {"prepend_scheme": "never"}
    return None if kind == "Prepend" or (kind == "Strip" and part.get("start")) else part


def _prefixes_first(spec: Mapping[str, object]) -> bool:
    """Return whether only what begins a conversation gets a space; ours begin with a control token."""
    part = spec.get("pre_tokenizer")
    return isinstance(part, dict) and part.get("prepend_scheme") == "first"


def _decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _composes(normalizer: object) -> bool:
    """Return whether a normalizer only converts between Unicode's composed and decomposed forms."""
    if not isinstance(normalizer, dict):
        return False
    if normalizer.get("type") == "Sequence":
        return all(map(_composes, normalizer["normalizers"]))
    return normalizer.get("type") in ("NFC", "NFD", "NFKC", "NFKD")


def _encodable(text: str) -> str:
    """Replace lone surrogates (of JSON escapes, of undecodable file names), which have no UTF-8 encoding."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
