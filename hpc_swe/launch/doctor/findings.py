"""Define what the checks of ``python -m hpc_swe.doctor`` take and return; they are pure, on measured facts.

`scheduler` checks what Slurm reports, `probe` measures one node from inside a job, `meeting` measures what
two nodes see of each other, and `nodes` checks what the probes measured.
"""

from dataclasses import dataclass
from typing import Literal

from hpc_swe.base.records import Role
from hpc_swe.models.builds import NeedsBuild

Severity = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """A finding is the result of one check.

    A fault stops a run or harms other users; a warning costs time, or work that is done twice.
    """

    check: str
    verdict: Severity
    says: str
    """The fact that was found, as a sentence."""
    remedy: str = ""
    where: str = "cluster"


@dataclass(frozen=True)
class ComputingNeeds:
    """Describe what the learner or an engine needs of a node that it computes on."""

    what: str
    plugin: NeedsBuild | None
    """The table [policy] or [engine]; None if it computes with neither torch nor vLLM."""
    least_gib: float = 0.0
    """Memory of each GPU; 0 is unknown, or none is needed."""
    has_experts: bool = False
    """Whether the model has experts, whose kernels not every GPU has."""


@dataclass(frozen=True)
class JobNeeds:
    """Describe what one job of a role asks of each of its nodes."""

    role: Role
    minutes: float
    cores: int
    memory_gb: float


@dataclass(frozen=True)
class PartitionNeeds:
    """Describe what a run needs of one partition; without a name it is this machine, outside any job."""

    partition: str = ""
    options: tuple[str, ...] = ()
    """More options of srun, such as the account."""
    gpus: int = 0
    """GPUs per node."""
    job_nodes: int = 1
    """Nodes of the largest job."""
    nodes: int = 2
    """Nodes to probe."""
    memory_mb: int = 1024
    """Memory that the probe requests."""
    computing: tuple[ComputingNeeds, ...] = ()
    """Of learner and engines, if their jobs run there."""
    jobs: tuple[JobNeeds, ...] = ()
    """Of each role whose jobs run there."""
