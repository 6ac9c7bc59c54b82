"""Publish a report's folder: the page's own files, and the data that a browser loads when it needs them.

A page that is opened as a file may load scripts but may not fetch data. So each data file is a script with
the one statement `report(name, value)`. What policies wrote is in string literals of plain ASCII without "<":
no text can end the literal or the script. The page shows it as text, and its policy allows no other script.
"""

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_swe.base.errors import ConfigError, HpcSweError, boundary
from hpc_swe.base.store import atomic

PAGE, NONCE = "page.html", "NONCE"
ASSETS = ("page.css", "page.js", "curves.js", "table.js", "episode.js")
INDEX, DATA = "index.html", "data"


class ReportFolder:
    """A report under construction counts the bytes of the data that it has written."""

    def __init__(self, root: Path) -> None:
        self.root, self.bytes = root, 0

    def add(self, name: str, value: object) -> None:
        """Write one data file; the page asks for it by `name`, which may contain slashes."""
        data = script(name, value)
        path = self.root / DATA / f"{name}.js"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.bytes += len(data)

    def finish(self) -> None:
        """Write the page, with a new password for its scripts and styles."""
        here, nonce = Path(__file__).parent, secrets.token_hex(16)
        text = (here / PAGE).read_text(encoding="ascii").replace(NONCE, nonce)
        (self.root / INDEX).write_text(text, encoding="ascii")
        for name in ASSETS:
            shutil.copyfile(here / name, self.root / name)


def script(name: str, value: object) -> bytes:
    """Return a script that gives `value` to the page: ASCII, without "<", on one line."""
    literals = (json.dumps(part, separators=(",", ":")).replace("<", r"\u003c") for part in (name, value))
    return f"report({','.join(literals)});\n".encode("ascii")


@contextmanager
def publishing(out: Path) -> Iterator[ReportFolder]:
    """Yield a folder that replaces the report at `out` when the block ends, and is removed when it fails.

    Raise ConfigError if something else than a report is at `out`, and HpcSweError if the folder cannot be
    written.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not is_report(out)):
        raise ConfigError(f"{out}: exists and is no report; name another folder with --out")
    stage = atomic.temporary(out)
    with boundary(HpcSweError, f"write {out}"), atomic.storage(out):
        stage.mkdir(parents=True)
        try:
            folder = ReportFolder(stage)
            yield folder
            folder.finish()
            _replace(stage, out)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise


def is_report(folder: Path) -> bool:
    """Return whether a folder is a report that `publishing` wrote."""
    return (folder / INDEX).is_file() and (folder / DATA / "run.js").is_file()


def _replace(stage: Path, out: Path) -> None:
    if is_report(out):
        old = atomic.temporary(out)
        out.rename(old)
        stage.rename(out)
        shutil.rmtree(old)
    else:
        stage.rename(out)  # onto nothing, or onto an empty folder
