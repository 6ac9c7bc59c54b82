"""Programs that are sent to containers and interpreters as text: standard library only."""

import re
from pathlib import Path


def joined(*names: str) -> str:
    """Return the texts of these modules as one program, without what they import from each other."""
    texts = [Path(__file__).with_name(f"{name}.py").read_text() for name in names]
    return re.sub(r"(?m)^from hpc_swe.*$", "", "\n\n".join(texts))
