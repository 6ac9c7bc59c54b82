"""Pages begin with what to type and what it shows, and hold no traces of a merge."""

import re

import pytest

from tests.docs.commands import PAGES, commands

FIRST_LINES = 40
MERGED = re.compile(r"^(?:<{7}|>{7}|={7}$)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_a_command_and_what_it_shows(page):
    first = page.read_text(encoding="utf-8").splitlines()[:FIRST_LINES]
    assert any(command.number <= FIRST_LINES for command in commands(page)), f"{page.name}: no command"
    assert any("ou will see" in line for line in first), f"{page.name}: does not say what the reader will see"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_holds_no_marks_of_a_merge(page):
    assert MERGED.findall(page.read_text(encoding="utf-8")) == []
