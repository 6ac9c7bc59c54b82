"""README.md and docs/*.md: what they tell people to type is there, and is understood."""

import re

import pytest

from tests.docs.commands import GENERATED, PAGES, commands, judge
from tests.docs.reference import sections

pytestmark = pytest.mark.slow  # it asks each program for its help


def test_every_command_of_the_pages_works_as_far_as_it_can_be_tried_here(tmp_path):
    told = [(command, judge(command, tmp_path)) for page in PAGES for command in commands(page)]
    assert [f"{c.page}:{c.number}: {c.text}: {complaint}" for c, (_, complaint) in told if complaint] == []
    assert sum(how in ("planned", "options looked up", "looked up") for _, (how, _) in told) > 25


def test_what_is_wrong_on_a_page_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```\npython -m hpc_swe.launch start configs/demo.toml --bogus\nmake nothing-of-the-kind\n```\n\n"
        "    python -m hpc_swe.status RUN --wach\n    sbatch/none.sh RUN\n"
    )
    complaints = [judge(command, tmp_path)[1] for command in commands(page)]
    assert len(complaints) == 4
    assert all(complaints)


def test_commands_between_backticks_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Type `make demo` or `python -m hpc_swe.launch stop RUN --now`; `reward` is no command.\n"
    )
    assert [command.text for command in commands(page)] == [
        "make demo",
        "python -m hpc_swe.launch stop RUN --now",
    ]


def test_the_page_of_commands_has_each_command_with_its_options():
    """Words and not lines are compared, since Python's releases break and order them in other ways."""
    written = [part.partition("\n") for part in GENERATED.read_text(encoding="utf-8").split("\n## ")[1:]]
    assert {name: options(text) for name, _, text in written} == {
        name: options(text) for name, text in sections()
    }, "python -m tests.docs.reference > docs/commands.md"


def options(text):
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)))
