"""Read the modules of this folder as texts, for a sandbox in which this package is not installed."""

import re
from functools import cache
from pathlib import Path


def sandbox_texts(*modules: str) -> list[str]:
    """Read modules of this folder, without their imports of each other."""
    paths = [Path(__file__).with_name(f"{name}.py") for name in modules]
    return [re.sub(r"(?m)^from hpc_swe[^(\n]*(\([^)]*\))?.*$", "", path.read_text()) for path in paths]


@cache
def guard_text() -> str:
    """Return what `load_apart` of `apart` loads in a sandbox."""
    return "\n\n".join(sandbox_texts("report", "origins", "held", "look", "guard"))
