"""Keep answers back until the weights that sampled them have passed their probe.

An engine computes a probe only when it does not pause, so that requests are answered meanwhile, too. This
middleware holds the answers of requests that were under way or came since `HOLD`. When the supervisor calls
`RELEASE`, they are sent; when it begins another update instead, because the weights failed, they are refused.
This needs nothing of vLLM's scheduler. An answer that is streamed would not be kept back; the suite asks for
none.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

HOLD, RELEASE = "/hpc_swe/hold", "/hpc_swe/release"
SAMPLE = "/hpc_swe/sample"
"""Our own route for samples, see `_vllm.samples`."""
HELD = (SAMPLE, "/inference/v1/generate", "/v1/completions", "/v1/chat/completions")
PROBE = b"probe"
"""Query of the requests that compute the probe: nothing keeps their answers back."""
LONGEST_S = 900.0
"""Seconds after which a supervisor that died in an update counts as one whose weights failed; the query of
`HOLD` may state another number."""
REFUSAL = b"the weights that sampled this failed their probe, or were not compared with it"
Scope = MutableMapping[str, Any]
Send = Callable[..., Awaitable[None]]


@dataclass(eq=False)
class UncheckedSwap:
    """New weights serve, and were not compared with their probe yet."""

    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    has_passed: bool = False

    async def passed_probe(self) -> bool:
        """Wait for the comparison, and return whether the weights passed it."""
        await self.is_over.wait()
        return self.has_passed


@dataclass(eq=False)
class PendingRequest:
    """Represent a request that is under way."""

    swaps: list[UncheckedSwap]
    """Swaps whose weights may have sampled a part of its answer."""


class AnswerGate:
    """Pass on all requests to an ASGI application, and keep back answers that are in doubt."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._unchecked: UncheckedSwap | None = None
        self._pending: set[PendingRequest] = set()

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Send) -> None:
        path = scope.get("path")
        if path in (HOLD, RELEASE):
            if path == HOLD:
                self._hold(float(scope["query_string"] or LONGEST_S))
            else:
                self._end(has_passed=True)
            await answer(send, 200, b"{}")
        elif path in HELD and scope["query_string"] != PROBE:
            await self._pass_on(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Callable[..., Any], send: Send) -> None:
        pending = PendingRequest([self._unchecked] if self._unchecked else [])
        is_trusted: bool | None = None

        async def send_trusted(message: MutableMapping[str, Any]) -> None:
            nonlocal is_trusted
            if is_trusted is None:
                swaps = tuple(pending.swaps)  # later ones have no part in a finished answer
                is_trusted = all([await swap.passed_probe() for swap in swaps])
                if not is_trusted:
                    await answer(send, 503, REFUSAL)
            if is_trusted:
                await send(message)

        self._pending.add(pending)
        try:
            await self._app(scope, receive, send_trusted)
        finally:
            self._pending.discard(pending)

    def _hold(self, longest_s: float) -> None:
        """Keep answers back; after `longest_s` refuse them, until another swap or `RELEASE`."""
        self._end(has_passed=False)
        self._unchecked = UncheckedSwap()
        asyncio.get_running_loop().call_later(longest_s, self._unchecked.is_over.set)
        for pending in self._pending:
            pending.swaps.append(self._unchecked)

    def _end(self, *, has_passed: bool) -> None:
        if self._unchecked is not None:
            self._unchecked.has_passed = has_passed
            self._unchecked.is_over.set()
            self._unchecked = None


async def answer(send: Send, status: int, body: bytes) -> None:
    """Send a whole answer."""
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
