"""Answer requests for samples with arrays, from within vLLM's HTTP process.

That process computes on one thread for all requests, and vLLM's own routes make some objects for each token:
with a small model they limit what an engine samples. This route asks the same engine client.
"""

import asyncio
import io
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from vllm import exceptions
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from hpc_swe.base.records import EngineStages, EngineTime
from hpc_swe.models.engines._answers import SampleAnswer, SampleRequest, TokenScores
from hpc_swe.models.engines._vllm.clock import PAUSES, RESUMES, EngineClock
from hpc_swe.models.engines._vllm.gate import SAMPLE, Scope, Send, answer

BAD_REQUEST = (ValueError, getattr(exceptions, "VLLMClientError", ValueError))
"""Errors that the request causes; vLLM 0.26 raises ValueError."""
Receive = Callable[[], Awaitable[Scope]]


class SampleRoute:
    """Pass on all requests to an ASGI application but those for samples."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._clock: EngineClock | None = None
        """That of the engine, once a request has come; before, it has computed nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if path == SAMPLE:
            await self._answer(scope["app"].state.engine_client, receive, send)
            return
        if self._clock and path in PAUSES:
            self._clock.pause()
        await self._app(scope, receive, send)
        if self._clock and path in RESUMES:
            self._clock.resume()

    async def _answer(self, engine: Any, receive: Receive, send: Send) -> None:
        clock = self._clock = self._clock or _watch(engine)
        body = await _read(receive)
        sampling = asyncio.create_task(_sample(engine, body, clock))
        leaving = asyncio.create_task(_await_disconnect(receive))
        try:
            await asyncio.wait((sampling, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sampling.done():
                await answer(send, *sampling.result())
        finally:
            for task in (sampling, leaving):
                task.cancel()  # vLLM then aborts what is still sampled
            await asyncio.gather(sampling, leaving, return_exceptions=True)


def _watch(engine: Any) -> EngineClock:
    """Return a clock that hears of each forward pass, unless vLLM was started with --disable-log-stats."""
    speculation = engine.vllm_config.speculative_config
    clock = EngineClock(speculation.num_speculative_tokens if speculation else 0)
    if engine.logger_manager is not None:
        engine.logger_manager.stat_loggers.insert(0, clock)
    return clock


async def _read(receive: Receive) -> bytes:
    parts, has_more = [], True
    while has_more:
        message = await receive()
        parts.append(message.get("body", b""))
        has_more = message.get("more_body", False)
    return b"".join(parts)


async def _await_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _sample(engine: Any, body: bytes, clock: EngineClock) -> tuple[int, bytes]:
    """Return the status and the body of the answer to a `SampleRequest`."""
    clock.begin()
    try:
        request = msgspec.json.decode(body, type=SampleRequest)
        settings = SamplingParams(
            **request.sampling_params, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        name = f"sample-{uuid4().hex}"
        prompt = tokens_input(request.token_ids, cache_salt=request.cache_salt)
        outputs = [each async for each in engine.generate(prompt, settings, name, priority=request.priority)]
    except BAD_REQUEST as error:
        return 400, str(error).encode()
    except (EngineDeadError, EngineGenerateError) as error:
        cause = error.__cause__ or error  # not raised: vLLM gives one object to all requests, and the
        return 500, f"{type(cause).__name__}: {cause}".encode()  # tracebacks that it collects would be logged
    finally:
        clock.end()
    is_probe = outputs[-1].prompt_logprobs is not None  # no episode has its answer
    spent = EngineTime() if is_probe else clock.take()
    return 200, msgspec.msgpack.encode(_describe(outputs[-1], spent))


def _describe(result: RequestOutput, spent: EngineTime) -> SampleAnswer:
    [output] = result.outputs
    return SampleAnswer(
        token_ids=list(output.token_ids),
        sampled=_scores(output.logprobs),
        prompt=None if result.prompt_logprobs is None else _scores(result.prompt_logprobs),
        finish_reason=str(output.finish_reason),
        stop_reason=output.stop_reason,
        weight_versions=getattr(output, "weight_versions", None),  # vLLM 0.26 has none
        routed_experts=None if output.routed_experts is None else _file(output.routed_experts),
        stages=replace(_stages(result), engine=spent),
    )


def _stages(result: RequestOutput) -> EngineStages:
    tokens, cached, times = len(result.prompt_token_ids), result.num_cached_tokens or 0, result.metrics
    if times is None or not times.first_token_ts:  # without statistics, or aborted before its first token
        return EngineStages(prompt_tokens=tokens, cached_tokens=cached)
    return EngineStages(
        queue_s=times.scheduled_ts - times.queued_ts,
        prefill_s=times.first_token_ts - times.scheduled_ts,
        decode_s=times.last_token_ts - times.first_token_ts,
        prompt_tokens=tokens,
        cached_tokens=cached,
    )


def _scores(found: FlatLogprobs) -> TokenScores:
    """Return the scores of the tokens that came, which are the only ones: the request has logprobs = 0."""
    return TokenScores.of(found.token_ids, found.logprobs)


def _file(array: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
