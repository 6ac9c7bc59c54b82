"""Code and documents use standard terms, and docstrings are commands."""

import re

from tests.kit.checkout import ROOT

PRIVATE = re.compile(
    r"\b(?:second sittings?|sittings?|keepers?|company|hops?|gangs?|sentinels?|resting|bury|buried)\b",
    re.IGNORECASE,
)
GIVEN = re.compile(r'name="sentinels"|worker\.sentinel\b')  # of messages that runs have; Python's own
TELLS = re.compile(r'"""Tells?\b.*')
PRAGMA = re.compile(r" +# (?:noqa|type): .*")
SOURCES = [path for name in ("hpc_swe", "jobs") for path in sorted((ROOT / name).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_nobody_needs_a_word_of_our_own():
    found = {path: PRIVATE.findall(GIVEN.sub("", path.read_text())) for path in [*SOURCES, *PAGES]}
    assert {path: words for path, words in found.items() if words} == {}


def test_a_docstring_says_what_is_returned_or_done_not_told():
    assert [line for path in SOURCES for line in TELLS.findall(path.read_text())] == []


def test_no_line_of_code_is_wider_than_120_columns():
    lines = [PRAGMA.sub("", line) for path in SOURCES for line in path.read_text().splitlines()]
    assert [line for line in lines if len(line) > 120] == []
