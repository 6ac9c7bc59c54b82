"""One completion, whatever happens to the engines meanwhile.

A completion is asked for in parts of at most `PART` tokens, so that the death of an engine costs one part.
An aborted part (an engine paused, died or was preempted) is continued from the prompt and what was already
sampled, on the same engine or another; each part keeps its log-probabilities and versions.

How long a completion takes is no failure: a request waits for as long as its engine is alive. Only the time
in which no engine serves is bounded.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from hpc_swe.errors import EngineError, Overdue
from hpc_swe.plugins.engines.base import Completion, Engine
from hpc_swe.records import Endpoint, IdArray, Sampling, VersionSpan, WeightVersion
from hpc_swe.roles.rollout.endpoints import Endpoints

RETRY_S = 0.05
PART = 2048
"""Tokens of one request. The next part finds its prompt in the engine's prefix cache."""
SILENCE_S = 60.0
"""After so long without an answer, an engine is asked whether it is alive."""


@dataclass
class Sampled:
    """A completion, perhaps of several parts."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    engine: str = ""
    finish_reason: Literal["stop", "length"] = "length"
    continued: int = 0


class _Patience:
    """The time that is left without progress; what a working engine takes for an answer is not counted."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self.renew()

    def renew(self) -> None:
        """There was progress."""
        self._until = time.monotonic() + self._wait_s

    @property
    def left_s(self) -> float:
        """Seconds; 0 when it ran out."""
        return max(self._until - time.monotonic(), 0.0)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """The block's time is the engine's, unless that lost the request."""
        began = time.monotonic()
        try:
            yield
        except Overdue:
            raise
        except EngineError:
            self._until += time.monotonic() - began
            raise


class Sampler:
    """Asks engines; shared by the episode threads of a process."""

    def __init__(
        self, engine: Engine, endpoints: Endpoints, token: str, wait_s: float, part: int = PART
    ) -> None:
        """`wait_s` bounds the time without an engine that serves; `part` the tokens of one request."""
        self._engine, self._endpoints, self._token, self._wait_s = engine, endpoints, token, wait_s
        self._most = part

    def is_served(self) -> bool:
        """Whether an engine is listed that may be asked."""
        return self._endpoints.serves()

    def sample(self, prompt: IdArray, sampling: Sampling, prefer: str) -> Sampled:
        """Sample until the turn ends or `sampling.max_tokens` are there; `prefer` names the chain's engine.

        Raises:
            EngineError: No engine made progress in time, or one gave an answer that cannot be trusted.
        """
        done, patience = Sampled(engine=prefer), _Patience(self._wait_s)
        while True:
            before = len(done.token_ids)
            finish = self._try(prompt, sampling, done, patience)
            if finish in ("stop", "length") or len(done.token_ids) == sampling.max_tokens:
                done.finish_reason = "stop" if finish == "stop" else "length"
                return done
            if len(done.token_ids) > before:
                patience.renew()
            elif not patience.left_s:
                raise EngineError(f"{done.engine} aborted every request for {self._wait_s:g} s")
            if finish == "abort":
                done.continued += 1
                time.sleep(RETRY_S)

    def _try(self, prompt: IdArray, sampling: Sampling, done: Sampled, patience: _Patience) -> str:
        try:
            return self._part(prompt, sampling, done, patience)
        except _Untrusted:
            raise
        except EngineError:
            if not patience.left_s:
                raise
            return "abort"  # if it failed it rests now, so the next request goes to another

    def _part(self, prompt: IdArray, sampling: Sampling, done: Sampled, patience: _Patience) -> str:
        """How the part ended; `more` is a full part of an unfinished completion."""
        room = sampling.max_tokens - len(done.token_ids)
        part = msgspec.structs.replace(sampling, max_tokens=min(room, self._most))
        text = np.concatenate([prompt, np.asarray(done.token_ids, dtype="<i4")])
        with self._endpoints.take(done.engine, patience.left_s) as endpoint, patience.apart():
            silence_s = min(self._wait_s, SILENCE_S)
            completion = self._engine.generate(endpoint.url, self._token, text, part, silence_s)
            _check(completion, part.max_tokens, endpoint)
            done.spans += self._spans(completion, endpoint, len(done.token_ids))
        done.token_ids += completion.token_ids
        done.logprobs += completion.logprobs
        done.engine = endpoint.owner
        is_full = part.max_tokens < room and len(completion.token_ids) == part.max_tokens
        return "more" if is_full and completion.finish_reason == "length" else completion.finish_reason

    def _spans(self, completion: Completion, endpoint: Endpoint, offset: int) -> list[VersionSpan]:
        """Where the engine stamps nothing: everything that it may have served since the table was read."""
        if completion.spans is not None:
            return [_span(offset + start, offset + end, [v]) for start, end, v in completion.spans]
        if not completion.token_ids:
            return []
        served = [*endpoint.versions, *self._endpoints.versions(endpoint)]
        return [_span(offset, offset + len(completion.token_ids), served)]


class _Untrusted(EngineError):
    """An answer that another engine's would not mend: it is not asked for again."""


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
