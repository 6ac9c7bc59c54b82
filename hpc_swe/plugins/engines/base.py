"""The seam: the program that samples tokens, and how its weights are changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from hpc_swe.records import IdArray, ProbeScore, Sampling, WeightManifest, WeightVersion
from hpc_swe.store.folders import Identity


@dataclass(frozen=True)
class Completion:
    """What an engine sampled."""

    token_ids: list[int]
    """With the token that ended the turn, if one did."""
    logprobs: list[float]
    finish_reason: str
    """stop, length or abort."""
    spans: list[tuple[int, int, WeightVersion]] | None
    """(start, end, version) stamped by the engine; None where a release cannot, then the node cell tells."""


@dataclass(frozen=True)
class Offer:
    """What an engine says of itself."""

    model: str
    """Folder or name of the weights that it came up with."""
    max_model_len: int
    can_update: bool
    """Whether `reload` can work; any other engine serves what it came up with."""


@runtime_checkable
class Engine(Protocol):
    """The plugin. Its methods may be called from many threads."""

    max_model_len: int
    """Most tokens of prompt and completion that it takes."""

    def command(self, model: Path, host: str, port: int, name: str) -> Sequence[str]:
        """Argument vector that serves the weights in folder `model` under `name`.

        Raises:
            ConfigError: The program or the folder is missing.
        """

    def environment(self, token: str) -> dict[str, str]:
        """All variables of the server's process. The token goes here, never into argv."""

    def is_healthy(self, url: str) -> bool:
        """Whether the engine can answer now."""

    def is_alive(self, url: str, token: str, timeout_s: float) -> bool:
        """Whether each process of it that samples answers in time: one that hangs may still look healthy."""

    def inspect(self, url: str, token: str) -> Offer:
        """Ask an engine that somebody else started, and change nothing.

        Raises:
            EngineError: No answer, a refused key, or an answer that is no engine's.
        """

    def stamp(self, url: str, token: str) -> str | None:
        """What it writes on the tokens that it samples now; None where the release has no stamps.

        Raises:
            EngineError: No answer, or a refused key.
        """

    def adopt(self, url: str, token: str, version: WeightVersion, probe: ProbeScore | None) -> None:
        """Check the weights that an engine came up with, and have it stamp tokens with their version.

        Raises:
            EngineError: No answer, or the probe's log-probabilities are not the learner's.
        """

    def reload(
        self,
        url: str,
        token: str,
        folder: Path,
        manifest: WeightManifest | None,
        files: dict[str, Identity] | None = None,
    ) -> None:
        """Swap in a published version, or without a manifest the model that the run starts from.

        With `files` it loads only what still is the file that somebody verified.
        On any other error than NoAnswer the old weights go on serving, or the engine ends.

        Raises:
            NoAnswer: The engine is dead or hangs; this says nothing of the version.
            EngineError: The engine refused; the message names the file or tensor.
        """

    def generate(
        self, url: str, token: str, prompt: IdArray, sampling: Sampling, timeout_s: float
    ) -> Completion:
        """Sample one completion; after each `timeout_s` of silence the engine is asked whether it is alive.

        Raises:
            NoAnswer: It is not.
            Overdue: It is, but the completion took far longer than its tokens may.
            EngineError: An answer that cannot be trusted.
        """


@runtime_checkable
class Stopping(Protocol):
    """An engine that is told of tokens at which it stops, beside those that the model's folder names."""

    stop_token_ids: Sequence[int]
