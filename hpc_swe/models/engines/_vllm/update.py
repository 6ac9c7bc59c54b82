"""Call the routes of vLLM that update its weights, in the order in which nothing can be lost.

Reading comes first, while the engine serves. The pause lasts only for the swap in memory and the discarding
of caches. Debug lines of this module's log name each stage when it has ended; the benchmark of weights turns
them into a table.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from hpc_swe.base.errors import EngineError, NoAnswer, Overdue
from hpc_swe.models.engines import _answers, _http
from hpc_swe.models.engines._vllm import gate
from hpc_swe.models.engines.base import Weights

LOADED = re.compile(r"[^/]+\.safetensors|adapter_config\.json|model\.safetensors\.index\.json")
"""Files of a version that an engine loads; those in a folder `adapter/` are for people."""
CLEARINGS = 100
"""Attempts to clear the caches after an update."""

HELD_CALLS = 3
"""Slow calls while answers are kept back: the swap, the clearing of caches, and the probe."""

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateRoutes:
    """Hold the address of one engine."""

    url: str
    token: str
    timeout_s: float
    clears: bool
    """Whether a swap discards all cached keys and values."""

    def call(self, path: str, body: dict[str, object] | None = None) -> bytes:
        """Send a POST, and return the answer's body."""
        return _http.call(self.url, self.token, path, msgspec.json.encode(body or {}), self.timeout_s)

    def swap(self, update: dict[str, object], stamp: str | None, when_paused: Callable[[], T]) -> T:
        """Load what `update` names, and let tokens carry `stamp` from then on.

        Answers are kept back until `release`. The next swap refuses them, which loads other weights instead.
        Return what `when_paused` returned: what it asked the engine for is computed with the new weights.
        Raise EngineError if the engine goes on with the weights before, and NoAnswer if that is not certain.
        """
        self._start()
        self.call("/update_weights", {"update_info": update})  # reads; nothing is paused
        self._await_staged()
        try:
            self.call(f"/pause?mode=keep&clear_cache={str(self.clears).lower()}")
            paused = time.monotonic()
            self._hold()
            asked = when_paused()
            self.call("/finish_weight_update", {"weight_version": stamp} if stamp else {})
        except NoAnswer:
            raise  # an engine that hangs must not resume with half an update, should it wake up
        except EngineError:
            self.call("/resume")
            self.release()
            raise
        with ends_engine(f"{self.url}: new weights are loaded, and do not serve"):
            if self.clears:  # no prompt may be computed with two versions
                self._clear_caches()
            self.call("/resume")
        log.info("paused %s for %.3f s, for new weights", self.url, time.monotonic() - paused)
        return asked

    def release(self) -> None:
        """Let the engine send the answers that it has kept back since the swap."""
        with contextlib.suppress(_http.Refused):  # somebody runs it with an older release; _hold warned
            self.call(gate.RELEASE)

    def _hold(self) -> None:
        try:
            longest_s = HELD_CALLS * self.timeout_s
            self.call(f"{gate.HOLD}?{longest_s:g}")
        except _http.Refused as error:
            if error.status != 404:
                raise
            log.warning("%s answers before its probe: start it again with this release", self.url)

    def _start(self) -> None:
        try:
            self.call("/start_weight_update")
        except _http.Refused:  # a supervisor that died left an update open; a failing update closes it
            with contextlib.suppress(_http.Refused):
                self.call("/update_weights", {"update_info": {"path": os.devnull}})
            self.call("/start_weight_update")

    def _await_staged(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            data = self.call("/collective_rpc", {"method": "is_staged"})
            workers = _answers.decode(_answers.Stagings, self.url, data).results
            if all(worker.is_staged for worker in workers):
                return
            if time.monotonic() > deadline:
                raise Overdue(f"{self.url}: the weights were not read in {self.timeout_s:g} s")
            time.sleep(0.01)

    def _clear_caches(self) -> None:
        """Forget all KV caches, those of kept requests too; raise EngineError if vLLM still holds some."""
        for _ in range(CLEARINGS):  # vLLM refuses while blocks are held, and says that one may ask again
            data = self.call("/reset_prefix_cache?reset_running_requests=true")
            if _answers.decode(_answers.CacheReset, self.url, data).success:
                return
            time.sleep(0.05)
        raise EngineError(f"{self.url}: caches of the weights before are still in use")


def describe(weights: Weights) -> dict[str, object]:
    """Return what the engine's workers are told about a version; `worker.Folder` reads it."""
    *parents, update = [_link(each) for each in weights.chain]
    update |= {"parents": parents}
    if weights.manifest:
        tensors = weights.manifest.tensors.items()
        update |= {"dtypes": {name: info.dtype for name, info in tensors}}
        update |= {"digests": {name: info.digest for name, info in tensors}}
    return update


def _link(weights: Weights) -> dict[str, object]:
    """Name a folder as the engine's worker, which has another working folder, reads it."""
    files = weights.files
    loaded = {name: each for name, each in (files or {}).items() if LOADED.fullmatch(name)}
    seen = None if files is None else loaded
    return {"path": str(weights.folder.absolute()), "files": seen}


@contextlib.contextmanager
def ends_engine(message: str) -> Iterator[None]:
    """Turn a failure after which it is unknown what the engine serves into one that replaces the engine."""
    try:
        yield
    except EngineError as error:
        raise NoAnswer(f"{message}: {error}") from error
