"""Where this checkout lies, and an environment in which other processes import it and its tests."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / ".cache" / "images"
STAND_INS = ROOT / "tests" / "kit" / "stand_ins"
"""Packages that are imported and not used; for the Python path of who has them not."""


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, with the checkout before installed packages."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}
