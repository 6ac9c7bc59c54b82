"""One completion, whatever happens to the engines meanwhile.

An aborted generation (an engine paused, died or was preempted) is continued from the prompt and what
was already sampled, on the same engine or another; each part keeps its log-probabilities and versions.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from hpc_swe.errors import EngineError
from hpc_swe.plugins.engines.base import Completion, Engine
from hpc_swe.records import Endpoint, IdArray, Sampling, VersionSpan, WeightVersion
from hpc_swe.roles.rollout.endpoints import Endpoints

RETRY_S = 0.05


@dataclass
class Sampled:
    """A completion, perhaps of several parts."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    engine: str = ""
    finish_reason: Literal["stop", "length"] = "length"
    continued: int = 0


class Sampler:
    """Asks engines; shared by the episode threads of a process."""

    def __init__(self, engine: Engine, endpoints: Endpoints, token: str, wait_s: float) -> None:
        """`wait_s` bounds both the wait for an engine and one request to it."""
        self._engine, self._endpoints, self._token, self._wait_s = engine, endpoints, token, wait_s

    def is_served(self) -> bool:
        """Whether an engine is listed that may be asked."""
        return self._endpoints.serves()

    def sample(self, prompt: IdArray, sampling: Sampling, prefer: str) -> Sampled:
        """Sample until the turn ends or `sampling.max_tokens` are there; `prefer` names the chain's engine.

        Raises:
            EngineError: No engine made progress in time, or one gave an answer that cannot be trusted.
        """
        done = Sampled(engine=prefer)
        until = time.monotonic() + self._wait_s
        while True:
            before = len(done.token_ids)
            finish = self._try(prompt, sampling, done, until)
            if finish != "abort" or len(done.token_ids) == sampling.max_tokens:
                done.finish_reason = "stop" if finish == "stop" else "length"
                return done
            done.continued += 1
            if len(done.token_ids) > before:
                until = time.monotonic() + self._wait_s
            elif time.monotonic() >= until:
                raise EngineError(f"{done.engine} aborted every request for {self._wait_s:g} s")
            time.sleep(RETRY_S)

    def _try(self, prompt: IdArray, sampling: Sampling, done: Sampled, until: float) -> str:
        try:
            return self._part(prompt, sampling, done, until - time.monotonic())
        except _Untrusted:
            raise
        except EngineError:
            if time.monotonic() >= until:
                raise
            return "abort"  # that engine rests now, so the next request goes to another

    def _part(self, prompt: IdArray, sampling: Sampling, done: Sampled, left_s: float) -> str:
        with self._endpoints.take(done.engine, max(left_s, 0.0)) as endpoint:
            text = np.concatenate([prompt, np.asarray(done.token_ids, dtype="<i4")])
            room = sampling.max_tokens - len(done.token_ids)
            part = msgspec.structs.replace(sampling, max_tokens=room)
            completion = self._engine.generate(endpoint.url, self._token, text, part, self._wait_s)
            _check(completion, room, endpoint)
            done.spans += self._spans(completion, endpoint, len(done.token_ids))
        done.token_ids += completion.token_ids
        done.logprobs += completion.logprobs
        done.engine = endpoint.owner
        return completion.finish_reason

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
