"""The route for samples, with an engine client that does what a test tells it.

It runs in one process of its own, since vLLM changes the environment of the process that imports it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from hpc_swe.base.records import EngineStages, EngineTime
from hpc_swe.models.engines import _answers
from hpc_swe.models.engines._vllm.gate import SAMPLE
from tests.kit.crash import in_child
from tests.kit.waiting import DEADLINE_S

pytestmark = pytest.mark.slow
REQUEST = json.dumps({"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "logprobs": 0}}).encode()


class Engine:
    """Refuse the request, or sample for ever."""

    vllm_config, logger_manager = SimpleNamespace(speculative_config=None), None

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.has_begun, self.was_aborted = asyncio.Event(), asyncio.Event()

    async def generate(self, *_: object, priority: int) -> AsyncIterator[object]:
        self.has_begun.set()
        if self.refusal:
            raise self.refusal
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_aborted.set()
            raise
        yield


def ask(engine: Engine, messages: "asyncio.Queue[dict[str, Any]]", sent: list[dict[str, Any]]) -> Any:
    from hpc_swe.models.engines._vllm.samples import SampleRoute

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def no_app(*_: object) -> None:
        raise AssertionError("it was passed on")

    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    return SampleRoute(no_app)({"type": "http", "path": SAMPLE, "app": app}, messages.get, send)


async def a_client_that_leaves_ends_what_is_sampled_for_it() -> None:
    engine, messages, sent = Engine(), asyncio.Queue[dict[str, Any]](), list[dict[str, Any]]()
    asking = asyncio.create_task(ask(engine, messages, sent))
    messages.put_nowait({"type": "http.request", "body": REQUEST[:9], "more_body": True})
    messages.put_nowait({"type": "http.request", "body": REQUEST[9:]})
    await asyncio.wait_for(engine.has_begun.wait(), DEADLINE_S)
    messages.put_nowait({"type": "http.disconnect"})
    await asyncio.wait_for(engine.was_aborted.wait(), DEADLINE_S)
    await asyncio.wait_for(asking, DEADLINE_S)
    assert sent == []


async def answered(engine: Engine, body: bytes = REQUEST) -> tuple[int, bytes]:
    messages, sent = asyncio.Queue[dict[str, Any]](), list[dict[str, Any]]()
    messages.put_nowait({"type": "http.request", "body": body})
    await asyncio.wait_for(ask(engine, messages, sent), DEADLINE_S)
    return sent[0]["status"], sent[1]["body"]


async def a_refused_or_unreadable_request_is_answered_with_the_reason() -> None:
    assert await answered(Engine(ValueError("too long"))) == (400, b"too long")
    for body in (b"{}", REQUEST.replace(b"5", b"-5")):
        status, why = await answered(Engine(), body)
        assert (status, b"token_ids" in why) == (400, True)


async def the_death_of_an_engine_is_one_short_answer_for_each_request() -> None:
    """An error that leaves the route is logged, and vLLM raises one object for all requests."""
    from vllm.v1.engine.exceptions import EngineDeadError

    error = EngineDeadError()
    found = await asyncio.gather(*(answered(Engine(error)) for _ in range(50)))
    assert {status for status, _ in found} == {500}
    assert all(len(why) < 300 and why.startswith(b"EngineDeadError: ") for _, why in found)


async def results_of_each_release_become_the_same_answer() -> None:
    """Those of 0.26 name no weights."""
    from vllm.logprobs import FlatLogprobs

    from hpc_swe.models.engines._vllm.samples import _describe

    scores, prompt = FlatLogprobs(), FlatLogprobs()
    scores.append_fast([7], [-0.5], iter([1]), [None])
    prompt.append(None)
    prompt.append_fast([6], [-1.25], iter([1]), [None])
    routing = np.ones((2, 1, 1), np.uint8)
    old = {"token_ids": (7,), "logprobs": scores, "finish_reason": "abort", "stop_reason": None}
    asked = {"prompt_token_ids": [5, 6], "num_cached_tokens": 1, "metrics": None}
    outputs = [SimpleNamespace(**old, routed_experts=routing)]
    result = SimpleNamespace(outputs=outputs, prompt_logprobs=prompt, **asked)
    spent = EngineTime(idle_s=1.0)
    answer = _answers.from_samples("url", msgspec.msgpack.encode(_describe(result, spent)), [5, 6])
    assert (answer.token_ids, answer.logprobs, answer.prompt_logprobs) == ([7], [-0.5], [-1.25])
    assert answer.stages == EngineStages(prompt_tokens=2, cached_tokens=1, engine=spent)
    assert (answer.finish_reason, answer.stop_reason, answer.weight_versions) == ("abort", None, None)
    assert _answers.to_routing(answer, 2).tolist() == [[1], [1]]
    new = {"weight_versions": [{"version": "v000001-i01", "start": 0, "end": 1}], "routed_experts": None}
    result = SimpleNamespace(outputs=[SimpleNamespace(**old | new)], prompt_logprobs=None, **asked)
    answer = _answers.from_samples("url", msgspec.msgpack.encode(_describe(result, spent)), [5, 6])
    assert answer.weight_versions == [_answers.Stamp("v000001-i01", 0, 1)]
    assert (answer.prompt_logprobs, answer.routed_experts) == (None, None)


async def an_engines_time_is_divided_by_what_it_did() -> None:
    from hpc_swe.models.engines._vllm.clock import EngineClock

    time_s = [0.0]
    clock = EngineClock(drafts=1, now=lambda: time_s[0])

    def after(seconds: float, do: Any, *arguments: object) -> None:
        time_s[0] += seconds
        do(*arguments)

    def passed(seconds: float, prompts: int, sampling: int, tokens: int, waiting: int) -> None:
        details = SimpleNamespace(
            num_ctx_requests=prompts, num_generation_requests=sampling, num_generation_tokens=tokens
        )
        stats = SimpleNamespace(iteration_details=details, num_waiting_reqs=waiting)
        after(seconds, clock.record, stats)
        assert stats.iteration_details is None

    after(1, clock.begin)
    after(2, clock.begin)  # the first pass computes both prompts
    passed(4, 2, 0, 0, 1)
    passed(8, 0, 2, 4, 0)  # a proposed token each
    passed(16, 0, 2, 4, 1)
    after(32, clock.pause)
    after(64, clock.resume)
    after(0, clock.record, SimpleNamespace(iteration_details=None))  # a pass that computed nothing
    passed(128, 0, 2, 300, 1)  # conversations are computed again
    for _ in range(2):
        after(0, clock.end)
    after(256, clock.pause)
    after(512, clock.begin)
    after(1024, clock.resume)
    wanted = EngineTime(prefill_s=134, decode_s=56, full_s=16, paused_s=64 + 512 + 1024, idle_s=257)
    assert (clock.take(), clock.take()) == (wanted, EngineTime())


def play() -> None:
    asyncio.run(an_engines_time_is_divided_by_what_it_did())
    asyncio.run(a_client_that_leaves_ends_what_is_sampled_for_it())
    asyncio.run(a_refused_or_unreadable_request_is_answered_with_the_reason())
    asyncio.run(the_death_of_an_engine_is_one_short_answer_for_each_request())
    asyncio.run(results_of_each_release_become_the_same_answer())


def test_requests_end_with_clients_refusals_and_engines_and_mean_the_same() -> None:
    assert in_child(play) == 0
