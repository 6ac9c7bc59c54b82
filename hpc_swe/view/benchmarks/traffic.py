"""Keep an engine busy while its weights change, and note when its answers come.

Clients that want one token show how long an engine is silent, and when the new weights answer. Clients with
long prompts and answers show what an update costs the engine: one that was under way at the swap takes longer
than the others by the pause, and by what is computed again.
"""

import threading
import time
from bisect import bisect
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

from hpc_swe.base.errors import EngineError
from hpc_swe.base.records import Sampling
from hpc_swe.models.engines.base import Engine

PROBES = 4
"""Clients that want one token."""
PROBE_TOKENS = 16
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Load:
    """Say what clients with long requests ask for."""

    clients: int
    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Tokens of an answer."""


@dataclass(frozen=True)
class LongAnswer:
    """Say when one long answer was asked for and when it came, in seconds since the epoch."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class Traffic:
    """Ask an engine again and again, until it is over."""

    engine: Engine
    url: str
    token: str
    load: Load
    is_over: threading.Event = field(default_factory=threading.Event)
    answers: list[float] = field(default_factory=list)
    """When answers of one token came."""
    long_answers: list[LongAnswer] = field(default_factory=list)

    def probe(self, seed: int) -> None:
        """Ask for one token at a time; raise EngineError when an answer cannot be trusted."""
        rng = np.random.default_rng(seed)
        while not self.is_over.is_set():
            self._ask(rng, PROBE_TOKENS, 1)
            self.answers.append(time.time())

    def work(self, seed: int) -> None:
        """Ask for long answers; raise EngineError when one cannot be trusted."""
        rng = np.random.default_rng(seed)
        while not self.is_over.is_set():
            began = time.time()
            if self._ask(rng, self.load.prompt, self.load.answer) == self.load.answer:
                self.long_answers.append(LongAnswer(began, time.time()))

    def first_after(self, moment: float) -> float:
        """Return when the first answer of one token after a moment came; raise EngineError without one."""
        times = sorted(self.answers)
        place = bisect(times, moment)
        if place == len(times):
            raise EngineError(f"no answer came from {self.url} after new weights were loaded")
        return times[place]

    def longest_gap(self, start: float, end: float) -> float:
        """Return the longest time between two successive answers of one token."""
        times = [each for each in sorted(self.answers) if start <= each <= end]
        return max((b - a for a, b in zip(times, times[1:], strict=False)), default=0.0)

    def cost(self, start: float, end: float) -> tuple[float, float]:
        """Return what an engine lost by an interruption, and the tokens that requests had by then.

        The first is the seconds by which long answers that it interrupted came later than others do.
        """
        hit = [each for each in self.long_answers if each.began < start and each.ended > end]
        usual = median([each.seconds for each in self.long_answers if each not in hit] or [0.0])
        if not hit or not usual:
            return 0.0, 0.0
        tokens = [
            self.load.prompt + self.load.answer * min(1.0, (start - each.began) / usual) for each in hit
        ]
        return fmean(each.seconds for each in hit) - usual, sum(tokens)

    def _ask(self, rng: np.random.Generator, prompt: int, answer: int) -> int:
        ids = rng.integers(10, 300, prompt).astype(np.int32)
        sampling = Sampling(max_tokens=answer)
        return len(self.engine.generate(self.url, self.token, ids, sampling, TIMEOUT_S).token_ids)
