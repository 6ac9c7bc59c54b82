"""Docstrings are sentences."""

import ast

import pytest

from tests.docs.sentences import is_sentence, offenders
from tests.kit.checkout import ROOT


def test_every_docstring_opens_with_a_sentence_that_has_a_verb():
    assert list(offenders(ROOT)) == []


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (ast.FunctionDef, "Return the newest version that all ranks published.", True),
        (ast.FunctionDef, "The newest version that all ranks published.", False),
        (ast.FunctionDef, "What all ranks published.", False),
        (ast.FunctionDef, "Return the newest version", False),
        (ast.ClassDef, "A group decides when it is complete.", True),
        (ast.ClassDef, "A group of episodes.", False),
        (ast.ClassDef, "One look at the run that decides.", False),
        (ast.Module, "Keep one engine serving.", True),
    ],
)
def test_a_sentence_is_told_from_what_is_none(kind, text, expected):
    assert is_sentence(kind, text) is expected
