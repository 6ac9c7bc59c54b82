"""Describe what a run will cost as sums of parts, each with its formula, so that totals can be checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 2**30


@dataclass(frozen=True)
class Part:
    """Describe one summand."""

    what: str
    formula: str
    bytes: float
    inodes: int = 0


@dataclass(frozen=True)
class MemoryEstimate:
    """Describe the memory of one GPU, and what its process keeps in the memory of the node."""

    title: str
    parts: list[Part]
    total: Part | None
    """None where the parts are not all in use at once, or grow to what is free."""
    notes: list[str]
    """Further lines for people."""
    host: list[Part] = field(default_factory=list)
    """What a rank has in host memory as long as it runs, or while it writes a checkpoint."""
    least: float = 0.0
    """Bytes that the GPU must have at least; 0 is unknown."""
    choices: Mapping[str, float] = field(default_factory=dict)
    """Bytes that must be free on the GPU for each setting that the process may choose, the best first."""
