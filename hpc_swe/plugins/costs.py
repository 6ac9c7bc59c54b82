"""Describe what a run will cost as sums of parts, each with its formula, so that totals can be checked."""

from dataclasses import dataclass, field

GIB = 2**30


@dataclass(frozen=True)
class Part:
    """Describe one summand."""

    what: str
    formula: str
    bytes: float
    inodes: int = 0
    ranks: tuple[int, int] = (1, 1)
    """Of how many neighbouring ranks the first so many have it: (the first, of these)."""

    def most(self, neighbours: int) -> int:
        """Return how many ranks have it on the node where most do, if so many ranks share each node."""
        first, stride = self.ranks
        return min(neighbours, first * max(1, neighbours // stride))


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
