"""The seam: the program that samples tokens, and how its weights are changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from hpc_swe.records import IdArray, Sampling, WeightManifest, WeightVersion


@dataclass(frozen=True)
class Completion:
    """What an engine sampled."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """stop, length or abort."""
    spans: list[tuple[int, int, WeightVersion]] | None
    """(start, end, version) stamped by the engine; None where a release cannot, then the node cell tells."""


@runtime_checkable
class Engine(Protocol):
    """The plugin."""

    def command(self, model: Path, port: int, run: Path) -> Sequence[str]:
        """Argument vector that serves `model` on `port`."""
        ...

    def environment(self, token: str, version: WeightVersion) -> dict[str, str]:
        """Variables of the server's process."""
        ...

    def is_healthy(self, url: str, token: str) -> bool:
        """Whether the engine answers."""
        ...

    def reload(self, url: str, token: str, folder: Path, manifest: WeightManifest) -> None:
        """Swap in a published version; on any error the old weights go on serving.

        Raises:
            EngineError: The engine refused; the message says why.
        """
        ...

    def generate(
        self, url: str, token: str, prompt: IdArray, sampling: Sampling, timeout_s: float
    ) -> Completion:
        """Sample one completion.

        Raises:
            EngineError: No answer, or one that cannot be trusted.
        """
        ...

    def score(self, url: str, token: str, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of tokens 1 .. of a text under the present weights."""
        ...
