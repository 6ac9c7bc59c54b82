"""What a cluster must give, and how to tell: pure checks of measured facts, for ``python -m hpc_swe.doctor``.

`scheduler` reads what Slurm says of itself, `probe` measures one node from inside a job, `meeting` what
two nodes see of each other, and `nodes` judges what the probes measured.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """What one check found. A fault stops a run or harms others; a warning costs time, or work twice done."""

    check: str
    verdict: Severity
    says: str
    remedy: str = ""
    where: str = "cluster"


@dataclass(frozen=True)
class Ask:
    """What a run wants of one partition; without a name it is this machine, outside any job."""

    partition: str = ""
    words: tuple[str, ...] = ()
    """Further words of srun, such as the account."""
    gpus: int = 0
    """GPUs per node."""
    nodes: int = 2
    """Nodes that are probed."""
    memory_mb: int = 1024
    """Memory that the probe asks for."""
