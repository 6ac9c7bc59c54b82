"""Give a supervisor one interface to an engine that it starts and to one that somebody else runs.

Both have an address (`url`), and a `remedy`: where to look, or what to do, when the engine is not healthy.
The methods raise EngineError when it is not fit to serve.
"""

from hpc_swe.base.errors import EngineError
from hpc_swe.models.engines.base import Engine, Weights
from hpc_swe.roles.inference.child import Child


class OwnEngine:
    """Run an engine of our own: it starts with the weights and ends with the supervisor."""

    def __init__(self, engine: Engine, url: str, token: str, child: Child) -> None:
        self._engine, self._token, self._child = engine, token, child
        self.url, self.remedy = url, f"see {child.output}"

    def require_starting(self) -> None:
        """Check that its processes run."""
        self._child.require_alive()

    require_serving = require_starting

    def load(self, weights: Weights) -> None:
        """Adopt the weights that it was started with, and stamp tokens with their version."""
        probe = weights.manifest.probe if weights.manifest else None
        self._engine.adopt(self.url, self._token, weights.version, probe)

    def update(self, weights: Weights) -> None:
        """Reload the weights while requests run; after an error the previous weights stay."""
        self._engine.reload(self.url, self._token, weights)

    def release(self) -> None:
        """End all its processes."""
        self._child.stop()


class ExternalEngine:
    """Use an engine that somebody else runs. Its weights are unknown, so it is always given the first ones.

    An engine that cannot be updated serves the model that it was started with: enough to evaluate that model.
    """

    def __init__(self, engine: Engine, url: str, token: str) -> None:
        self._engine, self._token = engine, token
        self.url, self.remedy = url, "somebody else runs it: ask them, or `launch start` with another"
        self._stamp: str | None = None

    def require_starting(self) -> None:
        """Check nothing: its processes are not ours to see."""

    def require_serving(self) -> None:
        """Check its health and its stamp: an engine that restarted unseen is healthy, but has lost its stamp.

        If the engine's release has no stamps, an unseen restart cannot be detected.
        """
        if not self._engine.is_healthy(self.url):
            raise EngineError(f"no health at {self.url}; {self.remedy}")
        if (stamp := self._engine.stamp(self.url, self._token)) != self._stamp:
            raise EngineError(f"{self.url} stamps {stamp}, and was given {self._stamp}; {self.remedy}")

    def load(self, weights: Weights) -> None:
        """Update the engine if it offers updates; else it must already serve the run's model."""
        if self._engine.inspect(self.url, self._token).can_update:
            self.update(weights)
        elif weights.manifest is None:
            self._stamp = self._engine.stamp(self.url, self._token)
        else:
            raise EngineError(f"{self.url} cannot be given {weights.version.name}: it offers no updates")

    def update(self, weights: Weights) -> None:
        self._engine.reload(self.url, self._token, weights)
        self._stamp = self._engine.stamp(self.url, self._token)

    def release(self) -> None:
        """Leave the engine as it is."""


ServedEngine = OwnEngine | ExternalEngine
