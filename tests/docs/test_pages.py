"""Pages begin with what to type and what it shows, link to what exists, and hold no traces of a merge."""

import re

import pytest

from tests.docs.commands import GENERATED, PAGES, commands
from tests.kit.checkout import ROOT

FIRST_LINES = 40
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
WIDTH = 120
LINES = 3600
"""Of the pages of docs/ that people write, together."""
BLOCK = re.compile(r"(?<=\n\n)(?: {4}.*\n+)+")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
EDGES = [ROOT / name for name in ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md")]
"""Pages beside README.md that are not in docs/, but on the site."""
MERGED = re.compile(r"^(?:<{7}|>{7}|={7}$)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_a_command_and_what_it_shows(page):
    first = page.read_text(encoding="utf-8").splitlines()[:FIRST_LINES]
    assert any(command.number <= FIRST_LINES for command in commands(page)), f"{page.name}: no command"
    assert any("ou will see" in line for line in first), f"{page.name}: does not say what the reader will see"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_holds_no_marks_of_a_merge(page):
    assert MERGED.findall(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", [*EDGES, *PAGES], ids=lambda page: page.name)
def test_no_line_of_text_is_wider_than_an_editor_shows(page):
    text = BLOCK.sub("", FENCED.sub("", page.read_text(encoding="utf-8")))
    assert [line for line in text.splitlines() if len(line) > WIDTH and not line.startswith("|")] == []


@pytest.mark.parametrize("page", [*EDGES, *PAGES], ids=lambda page: page.name)
def test_every_link_of_a_page_names_a_file_and_a_heading_that_exist(page):
    found = LINK.findall(page.read_text(encoding="utf-8"))
    targets = [(page.parent / file if file else page, heading) for file, heading in found]
    missing = [f"{file.name}#{heading}" for file, heading in targets if not file.exists()]
    missing += [f"{file.name}#{word}" for file, word in targets if word and word not in anchors(file)]
    assert missing == []


def test_each_page_stands_in_the_contents_of_the_site_once():
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    outside = re.findall(r'"\w+\.md": "(\w+\.md)"', (ROOT / "docs/hooks.py").read_text(encoding="utf-8"))
    pages = [*outside, *(page.name for page in (ROOT / "docs").glob("*.md"))]
    assert len(outside) == len(EDGES) + 1
    assert sorted(re.findall(r"(\S+\.md)$", contents, re.MULTILINE)) == sorted(pages)


def test_the_pages_stay_short_enough_to_be_read():
    generated = {GENERATED, ROOT / "docs/configuration.md"}
    texts = [page.read_text(encoding="utf-8") for page in sorted({*(ROOT / "docs").glob("*.md")} - generated)]
    assert sum(len(text.splitlines()) for text in texts) <= LINES


def test_each_message_of_the_page_of_messages_is_one_of_the_code_s():
    page = (ROOT / "docs/messages.md").read_text(encoding="utf-8")
    sources = [
        path.read_text(encoding="utf-8")
        for room in ("hpc_swe", "jobs")
        for path in (ROOT / room).rglob("*.py")
    ]
    code = re.sub(r'"\s+f?"', "", "\n".join(sources)).lower()  # texts that stand on several lines
    titles = [
        " ".join(title.split()) for title in re.findall(r"^\* \*\*(.*?)\*\*", page, re.MULTILINE | re.DOTALL)
    ]
    quoted = [text for title in titles for text in re.findall(r"`([^`]+)`", title)]
    assert len(quoted) > 30
    assert [text for text in quoted if longest_piece(text) not in code] == []


def longest_piece(message):
    """Return the longest piece of a message that holds nothing which the code fills in."""
    pieces = re.split(r"\.\.+|[:,()]|\b\d+\b|stacks/|^waits for", message)
    return max((piece.strip().lower() for piece in pieces), key=len)


def anchors(page):
    """Return what GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
