"""Places of a test module where a test's expectation can be changed, and what to put there.

Nothing is rendered: a place is a piece of one line. Docstrings, decorators and names of tests are no places.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from hpc_swe.plugins.graders._expected import Reader, Twist

_FIXED = re.compile(
    r"\\(N\{[^}]*\}|x..|u.{4}|U.{8}|[0-7]{1,3}|.)|%\(\w+\)\w|%[-+ #0-9.]*[a-zA-Z%]|\{\w*\}|&#?\w+;|</?\w+",
    re.DOTALL,
)
"""Parts of a text that mean more than their letters."""
_PIECE = re.compile(r"[A-Za-z]+|[0-9]+")
_CHOICE = re.compile(r"[|?*\[]")
"""What lets a pattern match several texts."""
_VOWELS, _CONSONANTS = "aeiou", "bcdfghklmnprstvw"
_LONG = 8  # characters that no text contains by chance


_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """A piece of one line that is, or lies in, a literal that a test expects."""

    line: int
    """From 1."""
    start: int
    end: int
    """Characters of the line."""
    old: str
    is_within: bool = False
    """The literal is found within a longer text, which could hold another word of the test, too."""
    new: str = ""
    """The only other text; where there is none, any other one of its kind will do."""


@dataclass(frozen=True)
class Test:
    """A test function, and what it expects."""

    __test__ = False  # pytest, this is no test class
    owner: str
    """Its classes, joined by dots; empty for a function of the module."""
    name: str
    doc: str
    """First line of its docstring."""
    literals: tuple[Place, ...]
    twists: tuple[Place, ...]


def tests(text: str) -> list[Test]:
    """The tests of a module; none for a text that is no Python."""
    try:
        module = ast.parse(text)
        spots = _Spots(text)
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError):
        return []
    found = [
        Test(
            owner=owner,
            name=node.name,
            doc=(ast.get_docstring(node) or "").split("\n")[0].strip(),
            literals=spots.literals(node),
            twists=spots.twists(node),
        )
        for owner, node in _functions(module.body)
    ]
    names = Counter((test.owner, test.name) for test in found)
    return [test for test in found if names[test.owner, test.name] == 1]


def another(place: Place, words: Iterable[str], draw: Random) -> str:
    """Another text for a place, alike in form, that is never equal to it, in whatever case."""
    old = place.old
    if place.new:
        return place.new
    if old in ("True", "False", "None"):
        return draw.choice([word for word in ("True", "False") if word != old])
    if old.isdigit():
        least = 10 ** (len(old) - 1) if len(old) > 1 and old[0] != "0" else 0
        new = old
        while int(new) == int(old):
            new = str(draw.randrange(least, 10 ** len(old))).zfill(len(old))
        return new
    known = [word for word in words if word.lower() != old.lower() and abs(len(word) - len(old)) <= 1]
    if known and not place.is_within:
        return _cased(draw.choice(known), old)
    new = old
    while new.lower() == old.lower():
        new = "".join(draw.choice(_VOWELS if c in _VOWELS else _CONSONANTS) for c in old.lower())
    return _cased(new, old)


def words(found: Iterable[Test]) -> list[str]:
    """The words that tests expect, in one order."""
    return sorted({place.old for test in found for place in test.literals if place.old.isalpha()})


def _cased(new: str, old: str) -> str:
    """As the old word is written; a word of mixed case gives no rule."""
    for is_so, make in ((str.isupper, str.upper), (str.islower, str.lower), (str.istitle, str.capitalize)):
        if is_so(old):
            return make(new)
    return new


def _functions(body: Iterable[ast.stmt], owner: str = "") -> Iterator[tuple[str, _Function]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{owner}.{node.name}".lstrip("."))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield owner, node


class _Spots:
    """Where constants stand in a text."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.tokens: dict[int, list[tokenize.TokenInfo]] = {}
        """Line -> those that begin there."""
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.STRING, tokenize.NUMBER, tokenize.NAME):
                self.tokens.setdefault(token.start[0], []).append(token)

    def literals(self, test: _Function) -> tuple[Place, ...]:
        """Of a test, in the order of the text, each once."""
        found = {place for one in Reader(test).expected() for place in self.places(*one)}
        return tuple(sorted(found, key=lambda place: (place.line, place.start)))

    def twists(self, test: _Function) -> tuple[Place, ...]:
        """As `literals`."""
        return tuple(self._twisted(twist) for twist in Reader(test).twists())

    def _twisted(self, twist: Twist) -> Place:
        start, end = (self._column(twist.line, offset) for offset in (twist.start, twist.end))
        old = self.lines[twist.line - 1][start:end]
        return Place(twist.line, start, end, old, new=twist.new.format(old))

    def places(self, constant: ast.Constant, is_within: bool) -> Iterator[Place]:
        """Of one constant."""
        last = constant.end_lineno or 0
        start = constant.lineno, self._column(constant.lineno, constant.col_offset)
        end = last, self._column(last, constant.end_col_offset or 0)
        for line in range(constant.lineno, last + 1):
            for token in self.tokens.get(line, ()):
                if start <= token.start and token.end <= end:
                    yield from _of_token(token, is_within)

    def _column(self, line: int, offset: int) -> int:
        """Of bytes, in characters."""
        return len(self.lines[line - 1].encode()[:offset].decode(errors="replace"))


def _of_token(token: tokenize.TokenInfo, is_within: bool) -> Iterator[Place]:
    line, start = token.start
    if is_within and token.type != tokenize.STRING:  # what holds one value may well hold another
        return
    whole = Place(line, start, start + len(token.string), token.string, is_within)
    if token.type == tokenize.NAME:
        if token.string in ("True", "False", "None"):
            yield whole
    elif token.type == tokenize.NUMBER:
        if digits := re.match(r"[0-9]+(?![0-9_xXoObBjJ])", token.string):
            yield Place(line, start, start + digits.end(), digits[0], is_within)
    else:
        yield from _of_text(token, is_within)


def _of_text(token: tokenize.TokenInfo, is_within: bool) -> Iterator[Place]:
    """Words and digits of a text token, apart from escapes, fields and tags."""
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
