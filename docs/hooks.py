"""Add the pages that stand outside docs/ to the site of mkdocs, and keep each link within the site.

README.md, CONTRIBUTING.md, AGENTS.md and CHANGELOG.md stay where people look for them in a repository.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "house_style.md",
    "CHANGELOG.md": "changelog.md",
}
"""File of the repository -> page of the site."""
ELSEWHERE = re.compile(r"\[([^][]*)\]\((?:LICENSE|CITATION\.cff|\.github/[^)]*)\)")
"""Links to files that are no pages; the site shows their text alone."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside."""
    for source, page in OUTSIDE.items():
        text = Path(config.config_file_path).with_name(source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with its links as they are on the site."""
    text = markdown.replace("](docs/", "](").replace("](../", "](")
    for source, page in OUTSIDE.items():
        text = text.replace(f"]({source}", f"]({page}")
    return ELSEWHERE.sub(r"\1", text)
