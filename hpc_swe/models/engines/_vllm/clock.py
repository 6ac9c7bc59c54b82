"""Divide an engine's time by what it did, from within vLLM's HTTP process, which hears of each forward pass.

vLLM logs a line for each pass that it describes (--enable-logging-iteration-details). The clock is asked
before vLLM's own loggers, and takes the description away.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from hpc_swe.base.records import EngineTime

PAUSES, RESUMES = ("/pause", "/sleep"), ("/resume", "/wake_up")
"""Routes after which an engine computes nothing, and after which it computes again."""


class EngineClock(AggregateStatLoggerBase):  # type: ignore[misc]
    """Sum up seconds by what they were spent on, until they are taken."""

    def __init__(self, drafts: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        """Take the number of tokens that are proposed for each that is sampled."""
        self._most, self._now, self._at = 1 + drafts, now, now()
        self._requests, self._is_paused = 0, False
        self._spent = defaultdict[str, float](float)

    def begin(self) -> None:
        """Note that a request has come."""
        if not self._requests:
            self._spend("paused_s" if self._is_paused else "idle_s")
        self._requests += 1

    def end(self) -> None:
        """Note that a request was answered, or left."""
        self._requests -= 1

    def pause(self) -> None:
        """Note that the engine is told to compute nothing."""
        self._spend("decode_s" if self._requests else "idle_s")
        self._is_paused = True

    def resume(self) -> None:
        """Note that it computes again."""
        self._spend("paused_s")
        self._is_paused = False

    def take(self) -> EngineTime:
        """Return the seconds since the last call."""
        spent, self._spent = self._spent, defaultdict(float)
        return EngineTime(**spent)

    def record(self, scheduler_stats: Any, *_: object, **__: object) -> None:
        """Note a forward pass; vLLM calls this after each."""
        details = scheduler_stats and scheduler_stats.iteration_details
        if not details:
            return
        scheduler_stats.iteration_details = None
        sampled_most = self._most * details.num_generation_requests
        # A conversation that is computed again after a swap or a preemption counts as one that samples.
        has_prompts = details.num_ctx_requests > 0 or details.num_generation_tokens > sampled_most
        started = self._at
        self._spend("prefill_s" if has_prompts else "decode_s")
        if not has_prompts and scheduler_stats.num_waiting_reqs:
            self._spent["full_s"] += self._at - started

    def log_engine_initialized(self) -> None:
        """Do nothing: what was spent is taken with answers."""

    def _spend(self, kind: str) -> None:
        before, self._at = self._at, self._now()
        self._spent[kind] += self._at - before
