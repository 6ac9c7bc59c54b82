"""Find places in a test module where an expected value can be changed, and choose a new text for them.

A place is a piece of one line, so the rest of the module keeps its text. Docstrings, decorators and names of
tests contain no places.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from hpc_swe.base.syntax import parse, split_lines
from hpc_swe.tasks.graders._changed_tests.expected import Reader
from hpc_swe.tasks.graders._changed_tests.typed import Twist, Vocabulary
from hpc_swe.tasks.visible_tests import TestFunction, functions

_FIXED = re.compile(
    r"\\(N\{[^}]*\}|x..|u.{4}|U.{8}|[0-7]{1,3}|.)|%\(\w+\)\w|%[-+ #0-9.]*[a-zA-Z%]|\{\w*\}|&#?\w+;|</?\w+",
    re.DOTALL,
)
"""Escapes, fields and tags: parts of a text that mean more than their letters."""
_PIECE = re.compile(r"[A-Za-z]+|[0-9]+")
_CHOICE = re.compile(r"[|?*\[]")
"""Characters that let a pattern match several texts."""
_VOWELS, _CONSONANTS = "aeiou", "bcdfghklmnprstvw"
_FEW = 12
"""Words that are enough to choose from; those of the test itself come first."""
_LONG = 8  # a text of so many characters does not occur in another by chance


@dataclass(frozen=True)
class Place:
    """A place is a piece of one line: a literal that a test expects, or a part of one."""

    line: int
    """Number of the line, from 1."""
    start: int
    end: int
    """Offsets `start` and `end` count characters of the line."""
    old: str
    is_within: bool = False
    """Whether the literal is looked for within a longer text, which could hold other words of the test."""
    news: tuple[str, ...] = ()
    """The possible replacements; if empty, any other text of the same kind will do."""


@dataclass(frozen=True)
class Test:
    """A test is a function with the places where it expects values."""

    __test__ = False  # tells pytest that this is not a test class
    owner: str
    """Names of its classes, joined by dots; empty for a function of the module."""
    name: str
    doc: str
    """First line of its docstring."""
    literals: tuple[Place, ...]
    typed: tuple[Place, ...]
    """Places where another value of the same type may be expected; the reference shows which it fails."""
    words: tuple[str, ...] = ()
    """Words of the texts in the test."""


def tests(text: str) -> list[Test]:
    """Return the tests of a module whose names are unique; none if the text is not Python.

    There are none either where a lone carriage return ends a line for Python, and not for a patch.
    """
    if split_lines(text) != text.split("\n"):
        return []
    try:
        module = parse(text)
        finder = _PlaceFinder(text, Vocabulary(module))
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError):
        return []
    found = [
        Test(
            owner=owner,
            name=node.name,
            doc=(ast.get_docstring(node) or "").split("\n")[0].strip(),
            literals=finder.literals(node),
            typed=finder.typed(node),
            words=_words(node),
        )
        for owner, node in functions(module.body)
    ]
    names = Counter((test.owner, test.name) for test in found)
    return [test for test in found if names[test.owner, test.name] == 1]


def replacement(place: Place, words: Sequence[Collection[str]], draw: Random) -> str:
    """Choose a text for a place that has the same form and differs from the old one in more than case.

    `words` are those of the test, of its module, and so on: the first ones that fit are preferred.
    """
    old = place.old
    if place.news:
        return draw.choice(place.news)
    if old in ("True", "False", "None"):
        return draw.choice([word for word in ("True", "False") if word != old])
    if old.isdigit():
        return _number(old, draw)
    alike = [word for some in words for word in some if word.lower() != old.lower()]
    for most in (1, 2, 3):
        if known := [word for word in alike if abs(len(word) - len(old)) <= most]:
            return _cased(draw.choice(known[: max(_FEW, len(known) // 2)]), old)
    new = old
    while new.lower() == old.lower():
        new = "".join(draw.choice(_VOWELS if c in _VOWELS else _CONSONANTS) for c in old.lower())
    return _cased(new, old)


def _number(old: str, draw: Random) -> str:
    least = 10 ** (len(old) - 1) if len(old) > 1 and old[0] != "0" else 0
    near = [int(old) + step for step in range(-3, 4) if step]
    fitting = [number for number in near if least <= number < 10 ** len(old)]
    return str(draw.choice(fitting)).zfill(len(old))


def words(found: Iterable[Test]) -> list[str]:
    """Return the words of the texts in tests."""
    return sorted({word for test in found for word in test.words})


def _words(test: TestFunction) -> tuple[str, ...]:
    texts = [
        node.value
        for node in ast.walk(test)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    plain = _FIXED.sub(" ", " ".join(texts))
    return tuple(dict.fromkeys(word for word in re.findall("[A-Za-z]+", plain) if len(word) > 1))


def _cased(new: str, old: str) -> str:
    cases = ((str.isupper, str.upper), (str.islower, str.lower), (str.istitle, str.capitalize))
    return next((convert(new) for has_case, convert in cases if has_case(old)), new)


class _PlaceFinder:
    """A finder locates nodes of a module's syntax tree in its text."""

    def __init__(self, text: str, known: Vocabulary) -> None:
        self.lines, self._known = text.split("\n"), known
        self.tokens: dict[int, list[tokenize.TokenInfo]] = {}
        """Line -> the tokens that begin there."""
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.STRING, tokenize.NUMBER, tokenize.NAME):
                self.tokens.setdefault(token.start[0], []).append(token)

    def literals(self, test: TestFunction) -> tuple[Place, ...]:
        """Return the places of a test's expected literals, each once, in the order of the text."""
        found = {place for one in Reader(test).expected() for place in self.places(*one)}
        return tuple(sorted(found, key=lambda place: (place.line, place.start)))

    def typed(self, test: TestFunction) -> tuple[Place, ...]:
        """Return the places where another value of the same type may be expected, apart from literals."""
        found = []
        for one in Reader(test).typed(self._known):
            found += [*self.places(one, False)] if isinstance(one, ast.Constant) else [self._twisted(one)]
        return tuple(dict.fromkeys(found))

    def _twisted(self, twist: Twist) -> Place:
        start, end = (self._column(twist.line, offset) for offset in (twist.start, twist.end))
        old = self.lines[twist.line - 1][start:end]
        news = tuple(new.replace("{}", old) if old else new for new in twist.news)
        return Place(twist.line, start, end, old, news=news)

    def places(self, constant: ast.Constant, is_within: bool) -> Iterator[Place]:
        last = constant.end_lineno or 0
        start = constant.lineno, self._column(constant.lineno, constant.col_offset)
        end = last, self._column(last, constant.end_col_offset or 0)
        for line in range(constant.lineno, last + 1):
            for token in self.tokens.get(line, ()):
                if start <= token.start and token.end <= end:
                    yield from _of_token(token, is_within)

    def _column(self, line: int, offset: int) -> int:
        return len(self.lines[line - 1].encode()[:offset].decode(errors="replace"))


def _of_token(token: tokenize.TokenInfo, is_within: bool) -> Iterator[Place]:
    line, start = token.start
    if is_within and token.type != tokenize.STRING:  # a text that contains one value may contain another
        return
    if token.type == tokenize.NAME:
        if token.string in ("True", "False", "None"):
            yield Place(line, start, start + len(token.string), token.string, is_within)
    elif token.type == tokenize.NUMBER:
        if digits := re.match(r"[0-9]+(?![0-9_xXoObBjJ])", token.string):
            yield Place(line, start, start + digits.end(), digits[0], is_within)
    else:
        yield from _of_text(token, is_within)


def _of_text(token: tokenize.TokenInfo, is_within: bool) -> Iterator[Place]:
    prefix = re.match(r"[a-zA-Z]*(\"\"\"|'''|\"|')", token.string)
    if prefix is None or "f" in prefix[0].lower():
        return
    if is_within and (len(token.string) < _LONG or _CHOICE.search(token.string)):
        return
    inner = token.string[prefix.end() : -len(prefix[1])]
    plain = _FIXED.sub(lambda found: "\0" * len(found[0]), inner)
    line, column = token.start[0], token.start[1] + prefix.end()
    for piece in _PIECE.finditer(plain):
        if is_within and len(piece[0]) < _LONG // 2:
            continue
        before = inner[: piece.start()]
        down = before.count("\n")
        at = len(before) - before.rfind("\n") - 1 if down else column + len(before)
        yield Place(line + down, at, at + len(piece[0]), piece[0], is_within)
