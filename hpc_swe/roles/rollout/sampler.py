"""Sample a completion across pauses, restarts and failures of the engines.

A completion is requested in parts of at most `PART` tokens, so that the death of an engine costs one part.
An aborted part (an engine paused, died or was preempted) is continued from the prompt and the tokens already
sampled, on the same engine or another; each part keeps its log-probabilities and versions.

A long completion is not a failure: a request waits as long as its engine is alive. Only the time in which no
engine serves is bounded. Of that, the time in which all engines sleep while the learner has their GPUs does
not count.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from hpc_swe.base.errors import EngineError, Overdue
from hpc_swe.base.records import Endpoint, EngineStages, IdArray, Sampling, VersionSpan, WeightVersion
from hpc_swe.models.engines.base import NEW, Completion, Engine, Prefix
from hpc_swe.roles.rollout.endpoints import Endpoints

RETRY_S = 0.05
PART = 2048
"""Most tokens of one request. The next part finds its prompt in the engine's prefix cache."""
SILENCE_S = 60.0
"""Seconds without an answer after which an engine is asked whether it is alive."""


@dataclass
class Sampled:
    """Collect a completion, perhaps of several parts."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    engine: str = ""
    finish_reason: Literal["stop", "length"] = "length"
    continued: int = 0
    """Aborted parts that were continued."""
    salt: str = ""
    """Name of the weights with which the chain began."""
    routed: int = 0
    """First tokens of prompt and completion whose routing is known."""
    routing: bytes = b""
    """uint8 [tokens, layers * k], the experts of those that the caller did not know; empty: not returned."""
    stages: EngineStages = EngineStages()


class _ProgressTimer:
    """Measure the time without progress, not counting the time that a working engine takes to answer."""

    def __init__(self, wait_s: float, clock: Callable[[], float]) -> None:
        self._wait_s, self._clock = wait_s, clock
        self.restart()

    def restart(self) -> None:
        self._until = self._clock() + self._wait_s

    @property
    def left_s(self) -> float:
        return max(self._until - self._clock(), 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock during the block, unless the engine lost the request (Overdue)."""
        began = self._clock()
        try:
            yield
        except Overdue:
            raise
        except EngineError:
            self._until += self._clock() - began
            raise


class Sampler:
    """Sample completions for the episode threads of a process, which share it."""

    def __init__(
        self, engine: Engine, endpoints: Endpoints, token: str, wait_s: float, part: int = PART
    ) -> None:
        """Bound the time without an engine that serves by `wait_s`, the tokens of one request by `part`."""
        self.endpoints, self._engine, self._token, self._wait_s = endpoints, engine, token, wait_s
        self._part_tokens = part

    def sample(
        self,
        prompt: IdArray,
        sampling: Sampling,
        prefer: str,
        prefix: Prefix = NEW,
        on_answer: Callable[[], None] = lambda: None,
    ) -> Sampled:
        """Sample until the turn ends or has `sampling.max_tokens`; `prefer` names the chain's engine.

        `prefix` is what the caller has of the chain, whose salt a new chain gets here. It hears of each part.
        Raise EngineError if no engine made progress in time, or if an answer cannot be trusted.
        """
        done = Sampled(engine=prefer, routed=prefix.routed, salt=prefix.salt)
        timer = _ProgressTimer(self._wait_s, self.endpoints.clock)
        while True:
            before = len(done.token_ids)
            finish = self._try(prompt, sampling, done, timer)
            has_grown = len(done.token_ids) > before
            if has_grown:
                on_answer()
            if finish in ("stop", "length") or len(done.token_ids) == sampling.max_tokens:
                done.finish_reason = "stop" if finish == "stop" else "length"
                if done.routed < len(prompt) + len(done.token_ids) - 1:  # the engine aborted the last part
                    done.routing = b""
                return done
            if has_grown:
                timer.restart()
            elif not timer.left_s:
                raise EngineError(f"{done.engine} aborted every request for {self._wait_s:g} s")
            if finish == "abort":
                done.continued += 1
                time.sleep(RETRY_S)

    def _try(self, prompt: IdArray, sampling: Sampling, done: Sampled, timer: _ProgressTimer) -> str:
        try:
            return self._part(prompt, sampling, done, timer)
        except _Untrusted:
            raise
        except EngineError:
            if not timer.left_s:
                raise
            return "abort"  # an engine that failed is suspended now, so the next request goes to another

    def _part(self, prompt: IdArray, sampling: Sampling, done: Sampled, timer: _ProgressTimer) -> str:
        """Sample one part; return how it ended, `more` for a full part of an unfinished completion."""
        room = sampling.max_tokens - len(done.token_ids)
        part = msgspec.structs.replace(sampling, max_tokens=min(room, self._part_tokens))
        ids = np.concatenate([prompt, np.asarray(done.token_ids, dtype="<i4")])
        with self.endpoints.take(done.engine, timer.left_s) as endpoint, timer.paused():
            silence_s = min(self._wait_s, SILENCE_S)
            # The oldest: during a swap, caches of the weights before must not get the name of the new ones.
            prefix = Prefix(done.routed, done.salt or min(endpoint.versions).name)
            completion = self._engine.generate(endpoint.url, self._token, ids, part, silence_s, prefix)
            _check(completion, part.max_tokens, endpoint)
            done.spans += self._spans(completion, endpoint, len(done.token_ids))
        done.token_ids += completion.token_ids
        done.logprobs += completion.logprobs
        done.stages += completion.stages
        if completion.routing is not None:
            done.routed += len(completion.routing)
            done.routing += completion.routing.tobytes()
        done.engine, done.salt = endpoint.owner, prefix.salt
        is_full = part.max_tokens < room and len(completion.token_ids) == part.max_tokens
        return "more" if is_full and completion.finish_reason == "length" else completion.finish_reason

    def _spans(self, completion: Completion, endpoint: Endpoint, offset: int) -> list[VersionSpan]:
        """Return the tokens' versions: the engine's stamps, or else all that it may have served meanwhile."""
        if completion.spans is not None:
            return [_span(offset + start, offset + end, [v]) for start, end, v in completion.spans]
        if not completion.token_ids:
            return []
        served = [*endpoint.versions, *self.endpoints.versions(endpoint)]
        return [_span(offset, offset + len(completion.token_ids), served)]


class _Untrusted(EngineError):
    """The engine's answer cannot be trusted; asking another engine would hide the fault."""


def _span(start: int, end: int, versions: list[WeightVersion]) -> VersionSpan:
    return VersionSpan(start=start, end=end, oldest=min(versions), newest=max(versions))


def _check(completion: Completion, room: int, endpoint: Endpoint) -> None:
    count, logprobs = len(completion.token_ids), completion.logprobs
    if len(logprobs) != count:
        raise _Untrusted(f"{endpoint.owner} gave {len(logprobs)} log-probabilities for {count} tokens")
    if not all(map(math.isfinite, logprobs)):
        raise _Untrusted(f"{endpoint.owner} gave a log-probability that is not finite")
    if count > room:
        raise _Untrusted(f"{endpoint.owner} gave {count} tokens where {room} were asked for")
    if completion.spans is None:
        return
    starts, ends = [start for start, _, _ in completion.spans], [end for _, end, _ in completion.spans]
    if [*starts, count] != [0, *ends]:
        raise _Untrusted(f"{endpoint.owner} gave version spans {completion.spans} for {count} tokens")
