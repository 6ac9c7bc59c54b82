"""What a supervisor looks after: an engine that it starts, or one that somebody else runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpc_swe.errors import EngineError
from hpc_swe.plugins.engines.base import Engine
from hpc_swe.records import WeightManifest, WeightVersion
from hpc_swe.roles.inference.child import Child
from hpc_swe.store.folders import Identity


@dataclass(frozen=True)
class Weights:
    """What an engine shall serve."""

    version: WeightVersion
    folder: Path
    manifest: WeightManifest | None
    """None of the model that the run starts from."""
    files: dict[str, Identity] | None
    """The files as they were when they were verified against the manifest; None without one."""


class Served(Protocol):
    """An engine with an address. Its methods raise EngineError when it is not fit to serve."""

    url: str
    remedy: str
    """Where to look, or what to do, when it is not healthy."""

    def require_coming(self) -> None:
        """While it is awaited."""

    def require_serving(self) -> None:
        """While it serves."""

    def take(self, weights: Weights) -> None:
        """See to it that these weights are served, and that tokens are stamped with their version."""

    def update(self, weights: Weights) -> None:
        """Swap these weights in while requests run; on an error those before go on serving."""

    def leave(self) -> None:
        """We end."""


class Ours:
    """An engine of our own: it comes up with the weights, and ends with us."""

    def __init__(self, engine: Engine, url: str, token: str, child: Child) -> None:
        self._engine, self._token, self._child = engine, token, child
        self.url, self.remedy = url, f"see {child.output}"

    def require_coming(self) -> None:
        """Its process lives."""
        self._child.require_alive()

    def require_serving(self) -> None:
        """Its process lives."""
        self._child.require_alive()

    def take(self, weights: Weights) -> None:
        """It came up with them."""
        probe = weights.manifest.probe if weights.manifest else None
        self._engine.adopt(self.url, self._token, weights.version, probe)

    def update(self, weights: Weights) -> None:
        """By its routes."""
        self._engine.reload(self.url, self._token, weights.folder, weights.manifest, weights.files)

    def leave(self) -> None:
        """No process of it is left."""
        self._child.stop()


class Theirs:
    """An engine of somebody else's. What it served before is unknown, so it is given its weights anew.

    One that cannot be updated serves the model that it came up with: enough to evaluate that model.
    """

    def __init__(self, engine: Engine, url: str, token: str) -> None:
        self._engine, self._token = engine, token
        self.url, self.remedy = url, "somebody else runs it: ask them, or `launch start` with another"
        self._stamp: str | None = None

    def require_coming(self) -> None:
        """Only time can tell."""

    def require_serving(self) -> None:
        """Its health, and its stamp: one that restarted between two looks is healthy, and has lost both.

        A release without stamps that restarts unseen cannot be told from one that did not.
        """
        if not self._engine.is_healthy(self.url):
            raise EngineError(f"no health at {self.url}; {self.remedy}")
        if (stamp := self._engine.stamp(self.url, self._token)) != self._stamp:
            raise EngineError(f"{self.url} stamps {stamp}, and was given {self._stamp}; {self.remedy}")

    def take(self, weights: Weights) -> None:
        """By an update, where it offers that."""
        if self._engine.inspect(self.url, self._token).can_update:
            self._engine.reload(
                self.url, self._token, weights.folder.absolute(), weights.manifest, weights.files
            )
        elif weights.manifest is not None:
            raise EngineError(f"{self.url} cannot be given {weights.version.name}: it offers no updates")
        self._stamp = self._engine.stamp(self.url, self._token)

    def update(self, weights: Weights) -> None:
        """By its routes."""
        self._engine.reload(self.url, self._token, weights.folder, weights.manifest, weights.files)
        self._stamp = self._engine.stamp(self.url, self._token)

    def leave(self) -> None:
        """As it is."""
