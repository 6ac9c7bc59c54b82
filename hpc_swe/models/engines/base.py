"""Define an inference engine: the server that samples tokens, and how its weights are updated."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hpc_swe.base.records import EngineStages, IdArray, ProbeScore, Sampling, WeightManifest, WeightVersion
from hpc_swe.base.store.folders import Identity
from hpc_swe.models.builds import Builds
from hpc_swe.models.costs import MemoryEstimate

ByteArray = NDArray[np.uint8]
Files = dict[str, Identity]  # name of a file -> what tells whether it changed since it was verified
FALLBACK = "weights are reloaded by vLLM"
"""How the line begins in which an engine's log says why vLLM loads weights itself, which is slower."""


@dataclass(frozen=True)
class Completion:
    """Hold one sampled completion."""

    token_ids: list[int]
    """The sampled tokens, with the one that ended the turn, if one did."""
    logprobs: list[float]
    """Log-probability of each sampled token."""
    finish_reason: str
    """stop, length or abort."""
    spans: list[tuple[int, int, WeightVersion]] | None
    """(start, end, version) as the engine stamped them; None where the release has no stamps, and the
    engine's cell in nodes/ names the version."""
    routing: ByteArray | None = None
    """uint8 [tokens, layers * k], the experts that computed each token of prompt and completion, from the
    first that was asked for to the last but one; None where the engine does not return them."""
    stages: EngineStages = EngineStages()
    """What the engine did for it, and for how long; all 0 where it does not say."""


@dataclass(frozen=True)
class Prefix:
    """Say what a caller has of the beginning of a prompt, which earlier requests of its chain had, too."""

    routed: int = 0
    """First tokens whose routing the caller has; an engine that returns routings leaves them out."""
    salt: str = ""
    """Name of the weights with which the chain began; empty when that is unknown. An engine that keeps caches
    of older weights uses those of requests with the same salt only."""


NEW = Prefix()


@dataclass(frozen=True)
class EngineInfo:
    """Describe a running engine in its own words."""

    model: str
    """Folder or name of the weights that it started with."""
    max_model_len: int
    can_update: bool
    """Whether `reload` can work; any other engine keeps the weights that it started with."""


@dataclass(frozen=True)
class Weights:
    """Name weights that an engine should serve."""

    version: WeightVersion
    folder: Path
    manifest: WeightManifest | None = None
    """None for the model that the run starts from."""
    files: Files | None = None
    """The files as they were verified against the manifest; None without a manifest."""
    parent: "Weights | None" = None
    """The version that this one changes; None if this one is a full snapshot."""

    @property
    def chain(self) -> "list[Weights]":
        """Return the full snapshot and the deltas that lead to this version, which is the last."""
        found = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]


class Engine(ABC):
    """Start an engine's server, and talk to it. The methods may be called from many threads."""

    load_timeout_s: float = 600.0  # until an engine has started, or answers while weights are updated
    stop_token_ids: Sequence[int] = ()
    """Stop tokens beside those that the model's folder names."""
    return_routing: bool = False
    """Completions say which experts computed each token."""
    speculation: str = ""
    """How tokens are proposed of which one forward pass checks several; empty: none are."""
    dtype: str = "auto"
    """Type of weights and activations; auto is what the model's config.json says."""
    kv_cache_dtype: str = "auto"
    """Type of cached keys and values; auto is that of activations."""
    loads_weights: ClassVar[bool] = False
    """The engine reads the model's weights, so they must be complete."""
    vital: ClassVar[str] = ""
    """How names of processes begin of which none ends before the engine does; empty: no name is known."""

    @abstractmethod
    def command(self, model: Path, host: str, port: int, name: str, context: int) -> Sequence[str]:
        """Return the command that serves folder `model` under `name` with `context` tokens at most.

        Raise ConfigError if the folder or the program is missing.
        """

    def serving(self, model: Path, name: str, context: int) -> Sequence[str]:
        """Return the command that serves a folder to any client, outside a run; empty if none does."""
        return []

    @abstractmethod
    def environment(self, token: str) -> dict[str, str]:
        """Return all environment variables of the server. They carry the token, which argv never may."""

    @abstractmethod
    def is_healthy(self, url: str) -> bool:
        """Return whether the server accepts requests now."""

    @abstractmethod
    def is_alive(self, url: str, token: str, timeout_s: float) -> bool:
        """Return whether each sampling process answers in time: one that hangs may still look healthy."""

    @abstractmethod
    def inspect(self, url: str, token: str) -> EngineInfo:
        """Describe an engine that somebody else started; raise EngineError if none answers, or not to us."""

    @abstractmethod
    def stamp(self, url: str, token: str) -> str | None:
        """Return the stamp of tokens that are sampled now; None where the release has no stamps."""

    @abstractmethod
    def adopt(self, url: str, token: str, version: WeightVersion, probe: ProbeScore | None) -> None:
        """Check the weights that an engine started with, and make it stamp tokens with their version.

        Raise EngineError when the probe's log-probabilities are not the learner's.
        """

    @abstractmethod
    def reload(self, url: str, token: str, weights: Weights) -> None:
        """Swap in a published version, or without a manifest the model that the run starts from.

        With `files` it loads only files that did not change since they were verified.
        Raise EngineError, with the file or tensor, when the engine refuses; it then serves the old weights,
        or has ended. Raise NoAnswer when it is dead or hangs, which says nothing about the version.
        """

    @abstractmethod
    def generate(
        self,
        url: str,
        token: str,
        prompt: IdArray,
        sampling: Sampling,
        timeout_s: float,
        prefix: Prefix = NEW,
    ) -> Completion:
        """Sample one completion; check after each `timeout_s` without data that the engine is alive.

        Raise NoAnswer when it is dead or hangs, Overdue when it works, but the completion
        takes far longer than its queue and its tokens may, and EngineError when the answer cannot be trusted.
        """

    @property
    def gpus(self) -> int | None:
        """Return how many GPUs one engine computes on; None where that is unknown."""
        return None

    def check_model(self, model: Path, context: int) -> None:  # noqa: B027
        """Raise ConfigError, with one line for each key that does not fit, unless the model can be served."""

    def memory(self, model: Path, context: int) -> MemoryEstimate | None:
        """Estimate the memory of one GPU for conversations of `context` tokens; None where it is unknown."""
        return None

    def build_problem(self, found: Builds) -> str:
        """Say why these builds cannot compute on the configured device, and the remedy; empty if they can."""
        return ""

    @property
    def sleep_arguments(self) -> Sequence[str] | None:
        """Return what its command needs in addition, so that it can sleep; None if it cannot."""
        return None

    def sleep(self, url: str, token: str) -> float | None:
        """Free the memory of weights and KV cache for the learner; requests are kept and wait.

        Return how many GiB of its fullest GPU all processes together still use; None where that is unknown.
        Raise EngineError unless it sleeps.
        """
        raise NotImplementedError

    def wake(self, url: str, token: str) -> None:
        """Load the same weights again and continue with the requests. Raise EngineError unless it does."""
        raise NotImplementedError
