"""Answers of weights in doubt, with the middleware that vLLM runs."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hpc_swe.models.engines._vllm.gate import HELD, HOLD, RELEASE, AnswerGate
from tests.kit.waiting import DEADLINE_S


class Client:
    """Ask an application that answers when it is told to."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.gate = AnswerGate(self._app)

    async def _app(self, scope: Any, receive: Any, send: Callable[..., Awaitable[None]]) -> None:
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"text"})

    async def ask(self, path: str, query: bytes = b"") -> int:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.gate({"type": "http", "path": path, "query_string": query}, None, send)
        return int(sent[0]["status"])


async def statuses_around(*orders: str) -> tuple[list[int], list[int], list[int]]:
    """Statuses of requests begun before the orders, after the first of them, and after all."""
    client = Client()
    before = [asyncio.create_task(client.ask(path)) for path in HELD]
    await asyncio.sleep(0)
    during = []
    for order in orders:
        assert await client.ask(order) == 200
        during = during or [asyncio.create_task(client.ask(path)) for path in HELD]
        await asyncio.sleep(0)
    client.may_answer.set()
    assert await client.ask(HELD[0], b"probe") == 200
    after = [await client.ask(HELD[0])] if orders[-1] == RELEASE else []
    return [await task for task in before], [await task for task in during], after


def test_answers_wait_until_the_weights_have_passed_their_probe() -> None:
    assert asyncio.run(statuses_around(HOLD, RELEASE)) == ([200] * 4, [200] * 4, [200])


def test_answers_of_weights_that_another_update_replaced_are_refused() -> None:
    assert asyncio.run(statuses_around(HOLD, HOLD, RELEASE)) == ([503] * 4, [503] * 4, [200])


def test_nothing_is_answered_while_weights_are_in_doubt() -> None:
    async def wait() -> bool:
        client = Client()
        client.may_answer.set()
        await client.ask(HOLD)
        held = asyncio.create_task(client.ask(HELD[0]))
        await asyncio.sleep(0.05)
        was_held = not held.done()
        await client.ask(RELEASE)
        return was_held and await held == 200

    assert asyncio.run(wait())


def test_a_finished_answer_does_not_wait_for_a_later_update() -> None:
    async def wait() -> int:
        client = Client()
        client.may_answer.set()
        await client.ask(HOLD)
        held = asyncio.create_task(client.ask(HELD[0]))
        await asyncio.sleep(0)
        await client.ask(RELEASE)
        await client.ask(HOLD)
        return await asyncio.wait_for(held, DEADLINE_S)

    assert asyncio.run(wait()) == 200


def test_a_supervisor_that_died_in_an_update_leaves_an_engine_that_answers() -> None:
    """It refuses what is in doubt, at once and not after another wait, until a supervisor has come back."""

    async def wait() -> list[int]:
        client = Client()
        client.may_answer.set()
        await client.ask(HOLD, b"0.05")
        found = [await asyncio.wait_for(client.ask(HELD[0]), DEADLINE_S) for _ in range(2)]
        await client.ask(HOLD, b"900")
        await client.ask(RELEASE)
        return [*found, await client.ask(HELD[0])]

    assert asyncio.run(wait()) == [503, 503, 200]
