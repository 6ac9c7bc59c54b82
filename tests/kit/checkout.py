"""Where this checkout lies, and how other processes import it and its tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / ".cache" / "images"
STAND_INS = ROOT / "tests" / "kit" / "stand_ins"
"""Packages that are imported and not used; for the Python path of who has them not."""


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, with the checkout before installed packages."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def typed(
    module: str, *words: object, folder: Path = ROOT, **more: str
) -> "subprocess.CompletedProcess[str]":
    """Return what a command of this checkout did and said, typed in a folder."""
    line = [sys.executable, "-m", module, *map(str, words)]
    return subprocess.run(
        line, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=1500
    )
