"""Find what a checkout has beside the package, and a wheel inside it: configs, containers and jobs."""

import difflib
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def folder(name: str) -> Path:
    """Return the folder of this name that belongs to the code that runs."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def similar(path: Path) -> str:
    """Return the file of configs/ whose name is nearest to that of a path; "" where none is near."""
    top = folder("configs")
    known = {each.stem: each for each in top.rglob("*.toml")}
    near = difflib.get_close_matches(path.stem.lower(), known, 1, 0.8)
    return f"configs/{known[near[0]].relative_to(top)}" if near else ""


def config(path: Path) -> Path:
    """Return a file of configs/: that of the working folder, or else the one that came with the code."""
    if path.parts[:1] != ("configs",) or path.exists():
        return path
    return folder("configs").joinpath(*path.parts[1:])
