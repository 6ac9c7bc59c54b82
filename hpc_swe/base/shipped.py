"""Find what a checkout has beside the package, and a wheel inside it: configs, containers and jobs."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def folder(name: str) -> Path:
    """Return the folder of this name that belongs to the code that runs."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def configs() -> dict[str, str]:
    """Return each file of configs/ by its name without the suffix."""
    top = folder("configs")
    return {each.stem: f"configs/{each.relative_to(top)}" for each in top.rglob("*.toml")}


def config(path: Path) -> Path:
    """Return a file of configs/: that of the working folder, or else the one that came with the code."""
    if path.parts[:1] != ("configs",) or path.exists():
        return path
    return folder("configs").joinpath(*path.parts[1:])
