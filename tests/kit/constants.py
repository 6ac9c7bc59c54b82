"""What tests configure runs with: no jobs, a model without anything, reports, plugins of other constants."""

from pathlib import Path
from typing import TypeVar

from hpc_swe.base.records import StatusReport, WeightVersion
from hpc_swe.config import job_counts

T = TypeVar("T")
NOBODY = [f"counts.{role}=0" for role in job_counts.ROLES["grpo"]]
"""Words for a run that starts no jobs."""


def empty_model(folder: Path, content: str = "{}") -> Path:
    """Make what a start takes for a model that it need not read."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text(content)
    return folder


def status_report(**changes: object) -> StatusReport:
    """Return a report that says nothing else."""
    nothing = {"beat": 1, "roles": [], "spools": {}, "waits_for": "", "step": 0, "recent": {}, "errors": []}
    return StatusReport(**{**nothing, "newest": WeightVersion(), **changes})


def varied(kind: type[T], **constants: object) -> type[T]:
    """Return a plugin's class of the same name with other class variables."""
    unknown = [name for name in constants if name not in vars(kind)]
    assert not unknown, f"{kind.__name__} has no {unknown}"
    return type(kind)(kind.__name__, (kind,), constants, frozen=True, kw_only=True)
