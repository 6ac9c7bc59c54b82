"""Generate the functions of the bug tasks: small ones in which one operator is left open.

A function's docstring names the right operator by a word. The operators form a ring, and each word leaves
three of them open, so even a policy that knows all of this is right only one time in three. No two words
leave the same three open: to know one word is of little use for another.
"""

import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from hpc_swe.base.records import Split

WORDS = {
    "plus": "+",
    "times": "*",
    "and": "&",
    "or": "|",
    "xor": "^",
    "minus": "-",
    "below": "<",
    "equals": "==",
    "above": ">",
}
OPERATORS = list(WORDS.values())
OPEN = (0, 1, 3)  # steps around the ring; any two words share at most one operator
COMPARISONS = ["below", "equals", "above"]
HOLE = "@"

# {e} is the expression with the operator, {x} its left side; {a} the first argument, {c} a local,
# {d} a loop variable.
PLAIN = [
    ["return {e}"],
    ["{c} = {e}", "return {c}"],
    ["return [{e}, {a}]"],
    ["return [{a}, {e}]"],
    ["{c} = [{e}]", "return {c}"],
    ["{c} = []", "{c}.append({e})", "return {c}"],
    ["{c} = {e}", "return [{c}, {a}]"],
    ["return ({e}, {a})"],
    ["{c} = ({a}, {e})", "return {c}"],
]
LOOPS = [
    ["return [{e} for {d} in {a}]"],
    ["{c} = [{e} for {d} in {a}]", "return {c}"],
    ["{c} = []", "for {d} in {a}:", "    {c}.append({e})", "return {c}"],
    ["return [{a}, [{e} for {d} in {a}]]"],
]
CONDITIONS = [
    ["if {e}:", "    return {a}", "return 0"],
    ["{c} = 0", "if {e}:", "    {c} = {a}", "return {c}"],
    ["return [{d} for {d} in {a} if {e}]"],
    ["{c} = 0", "for {d} in {a}:", "    if {e}:", "        {c} += 1", "return {c}"],
    ["{c} = []", "for {d} in {a}:", "    if {e}:", "        {c}.append({d})", "return {c}"],
]
BODIES = PLAIN + LOOPS + CONDITIONS
VERBS = ["Give", "Find", "Get", "Make"]
SYLLABLES = ["".join(pair) for pair in itertools.product("bdfgklmnprstvz", "aeiou")]
LETTERS = "abcdkmnpqstuvxyz"


@dataclass(frozen=True)
class Function:
    """A function has a hole in the place of one operator."""

    name: str
    word: str
    phrase: str
    """Expression that the docstring asks for, in words: ``z plus m``."""
    lines: list[str]
    loops: bool
    """Whether the first argument is a list."""
    constant: int | None
    """Right side of the expression; without one the function has a second argument."""

    @property
    def line(self) -> int:
        """Return the number of the line that has the hole, from 1."""
        return 1 + next(i for i, line in enumerate(self.lines) if HOLE in line)

    @property
    def right(self) -> str:
        """Return the operator that the docstring asks for."""
        return WORDS[self.word]

    @property
    def plausible(self) -> list[str]:
        """Return the operators that the word leaves open; the right one is first."""
        own = OPERATORS.index(self.right)
        return [OPERATORS[(own + step) % len(OPERATORS)] for step in OPEN]

    def source(self, operator: str) -> str:
        """Return the module's text with this operator."""
        return "\n".join(self.lines).replace(HOLE, operator) + "\n"


def pairings(split: Split) -> list[tuple[str, int]]:
    """Return the pairs of word and body that a split may use; every fourth is for held-out tasks only."""
    return [
        (word, body)
        for i, word in enumerate(WORDS)
        for body in range(len(BODIES) if word in COMPARISONS else len(PLAIN + LOOPS))
        if ((body + i) % 4 == 0) == (split == "eval")
    ]


def draw(rng: random.Random, split: Split) -> Function:
    """Draw a function of one split.

    Each split has its own pairs of word and body, its own names, letters and constants.
    """
    word, body = rng.choice(pairings(split))
    loops = any("for {d}" in line for line in BODIES[body])
    a, b, c, d = next(s for s in _draws(rng, LETTERS, 4) if _is_of(split, s))
    name = "".join(next(s for s in _draws(rng, SYLLABLES, 2) if _is_of(split, s)))
    constant = next(k for k in iter(lambda: rng.randint(2, 99), 0) if (k % 5 == 3) == (split == "eval"))
    constant_or_none = constant if rng.random() < 0.3 else None
    x, y = d if loops else a, b if constant_or_none is None else str(constant)
    text = {"e": f"{x} {HOLE} {y}", "a": a, "c": c, "d": d}
    phrase = f"{x} {word} {y}"
    return Function(
        name=name,
        word=word,
        phrase=phrase,
        lines=[
            f"def {name}({a}, {b}):" if constant_or_none is None else f"def {name}({a}):",
            f'    """{rng.choice(VERBS)}{" each" if loops else ""} {phrase}."""',
            *("    " + line.format(**text) for line in BODIES[body]),
        ],
        loops=loops,
        constant=constant_or_none,
    )


def _draws(rng: random.Random, pool: str | list[str], count: int) -> Iterator[list[str]]:
    while True:
        yield rng.sample(pool, count)


def _is_of(split: Split, parts: list[str]) -> bool:
    return (zlib.crc32("".join(parts).encode()) % 4 == 0) == (split == "eval")
