"""Decide how many episodes a worker has at once, by how long their requests waited in engines' queues.

An engine without room for the keys and values of all its requests lets some wait, and drops caches of those
that are between two turns: then prompts are computed again and again, and more episodes at once are slower.
"""

import threading
from dataclasses import dataclass, field

from hpc_swe.base.records import EngineStages

CROWDED, FREE = 0.15, 0.05
"""Shares of the time at engines that requests are queued, above and below which the number changes."""
FEWER, MORE = 0.8, 1.1
LEAST = 8
"""The number never falls below the slots divided by this, whatever makes requests wait."""


def following(limit: int, slots: int, active: int, seen: EngineStages) -> int:
    """Return the next number of episodes at once, after those `seen` ran while there were `active` ones."""
    engine_s = seen.queue_s + seen.prefill_s + seen.decode_s
    if seen.queue_s > CROWDED * engine_s and active <= limit:  # else what ended ran before the last change
        return max(1, slots // LEAST, int(FEWER * limit))
    return min(slots, int(MORE * limit) + 1) if seen.queue_s < FREE * engine_s or not engine_s else limit


@dataclass
class Admission:
    """Follow the queues of engines from one generation of episodes to the next; threads share it."""

    slots: int
    limit: int = field(init=False)
    _active: int = 0
    _ended: int = 0
    _seen: EngineStages = EngineStages()
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.limit = self.slots

    def allowed(self, active: int) -> int:
        """Return how many episodes there may be at once, now that there are `active` ones."""
        self._active = active
        return self.limit

    def note(self, stages: EngineStages) -> None:
        """Note what the requests of an episode that has ended waited for."""
        with self._lock:
            self._seen, self._ended = self._seen + stages, self._ended + 1
            if self._ended >= self.limit:
                self.limit = following(self.limit, self.slots, self._active, self._seen)
                self._seen, self._ended = EngineStages(), 0
