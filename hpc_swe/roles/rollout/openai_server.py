"""Serve the recorder to agent programs, in each of the dialects that they speak.

Each episode has a server of its own, on a socket that listens inside its sandbox. Only messages and tools
are taken from a request; the recorder alone sets how tokens are sampled, so other settings are ignored and
counted. Any process in the sandbox may connect, so a connection carries one request of bounded size in
bounded time, and few are served at once: the policy can keep only its own agent waiting.
"""

import logging
import re
import secrets
import select
import socket
import sys
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from msgspec import Raw

from hpc_swe.agents.loops.base import ChatAddress, ContextFull, TurnsSpent
from hpc_swe.base.errors import AgentError, EpisodeError, SandboxError
from hpc_swe.base.records import ExitStatus, ToolCall
from hpc_swe.roles.rollout.dialects.anthropic_messages import AnthropicMessages
from hpc_swe.roles.rollout.dialects.base import Conversation, DialectRequest, delivered
from hpc_swe.roles.rollout.dialects.gemini_contents import GenerateContent, StreamGenerateContent
from hpc_swe.roles.rollout.dialects.openai_chat import ChatCompletions
from hpc_swe.roles.rollout.dialects.openai_responses import OpenaiResponses
from hpc_swe.roles.rollout.recorder import Exchange, Recorder

MAX_BYTES = 4 * 1024**2
"""Longest body of a request: more than fits into any context."""
MAX_CONNECTIONS = 8
READ_S = 30.0
"""Longest silence of a client in the middle of a request."""
RESET_MS = 100
"""Longest wait for the reset of a closed peer, which the loopback sends at once."""
ROUTES: dict[str, type[DialectRequest]] = {
    "/v1/chat/completions": ChatCompletions,
    "/v1/messages": AnthropicMessages,
    "/v1/responses": OpenaiResponses,
    "/v1beta/models/*:generateContent": GenerateContent,
    "/v1beta/models/*:streamGenerateContent": StreamGenerateContent,
}
_MODEL = re.compile(r"(?<=^/v1beta/models/)[^/:]+(?=:)")
"""The model in a path, which is ignored as the field of other APIs is."""
HARMLESS = {"model", "user", "metadata", "store"}
"""Fields without effect on sampling; every other field that a dialect does not read is an ignored setting."""
STORED = {"previous_response_id", "conversation", "prompt", "cachedContent", "cached_content"}
"""Fields that name a part of the history, or of the prompt, that the API's own servers keep."""
KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_parsing = threading.Lock()
"""A parsed body may take fifty times its size in memory, so a process parses one at a time."""

log = logging.getLogger(__name__)


class ServedRecorder(Recorder):
    """Record a chat that an agent program may also reach as a server."""

    @contextmanager
    def serve(
        self, listener: socket.socket, most_turns: int, read_s: float = READ_S
    ) -> Iterator[ChatAddress]:
        """Serve at most `most_turns` replies on a listening socket until the block ends, which closes it."""
        self.turns_left = most_turns
        server = _Server(self, listener, read_s)
        threading.Thread(target=server.serve_forever, args=(0.05,), name="openai-server", daemon=True).start()
        try:
            yield ChatAddress(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", server.key)
        finally:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, recorder: Recorder, listener: socket.socket, read_s: float) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.recorder, self.key, self.read_s = recorder, secrets.token_hex(16), read_s
        self.sampled: dict[str, ToolCall] = {}
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def verify_request(self, request: object, client_address: object) -> bool:
        return self._connections.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exception()
        if isinstance(error, OSError):
            log.debug("broken request: %s", error)
            return
        log.exception("broken request")
        # Our own fault, so the episode is an infrastructure failure and gets no reward.
        self.recorder.failure = self.recorder.failure or SandboxError(f"the agent's server broke: {error!r}")


_PAIR = rb"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(rb"\\(?:" + _PAIR + rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)
"""Escapes of JSON; the group is half a character, as programs write that cut a text within an emoji."""


def _without_halves(body: bytes) -> bytes:
    """Replace halves of characters, which no text in UTF-8 can hold, by the character for what is unknown."""
    return _ESCAPES.sub(lambda found: rb"\ufffd" if found[1] else found[0], body)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    connection: socket.socket
    _asked = Conversation([])
    """The connection's request, once it is parsed."""

    def setup(self) -> None:
        self.request.settimeout(self.server.read_s)
        super().setup()

    def do_HEAD(self) -> None:
        self._head(200, "text/plain", 0)

    def do_GET(self) -> None:
        if self._is_allowed(["/v1/models"]):
            self._send(200, {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0}]})

    def do_POST(self) -> None:
        recorder = self.server.recorder
        body = self._body()
        if body is None or not self._is_allowed(ROUTES):
            return
        dialect = ROUTES[self._route]
        try:
            with _parsing:
                request = msgspec.json.decode(body, type=dialect)
                read = HARMLESS.union(dialect.__struct_encode_fields__)
                given = msgspec.json.decode(body, type=dict[str, Raw])
                ignored = given.keys() - read
                if stored := {name for name in ignored & STORED if bytes(given[name]) != b"null"}:
                    raise AgentError(f"{min(stored)}: nothing is stored here; send the whole history")
                self._asked = request.conversation(self.server.sampled)
            recorder.counts["ignored_settings"] += len(ignored)
            recorder.counts["dropped"] += self._asked.dropped
            exchange = recorder.ask(self._asked.messages, self._asked.tools)
        except ContextFull as error:
            self._end(ExitStatus.CONTEXT, f"prompt is too long: {error}", "context_length_exceeded")
        except TurnsSpent as error:
            self._end(ExitStatus.MAX_TURNS, str(error), "turns_spent")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AgentError) as error:
            self._end(ExitStatus.AGENT_ERROR, str(error), "invalid_request")
        except EpisodeError as error:
            self._refuse(503, str(error), "engine")
        else:
            self._answer(request, exchange)

    def _answer(self, request: DialectRequest, exchange: Exchange) -> None:
        """Mark the reply as delivered, then send it: the next request may come before the write returns."""
        recorder = self.server.recorder
        if request.stream:
            data = b"".join(request.events(exchange))
            self._head(200, "text/event-stream")
        else:
            data = msgspec.json.encode(request.answer(exchange))
            self._head(200, "application/json", len(data))
        if self._is_gone():
            return
        self.server.sampled |= delivered(exchange)
        recorder.deliver(exchange)
        try:
            self.wfile.write(data)
        except OSError as error:
            log.info("undelivered reply: %s", error)
            recorder.retract(exchange)

    def _is_gone(self) -> bool:
        """Return whether the client closed its connection, once the head was sent.

        A closed peer answers the head with a reset; one that only shut down its sending side does not.
        """
        look = select.poll()
        look.register(self.connection, select.POLLIN)
        if not look.poll(0) or self.connection.recv(1, socket.MSG_PEEK):
            return False
        look.modify(self.connection, 0)
        return bool(look.poll(RESET_MS))

    @property
    def _route(self) -> str:
        return _MODEL.sub("*", self.path.partition("?")[0])

    def _is_allowed(self, routes: Container[str]) -> bool:
        given = [
            self.headers.get("Authorization", "").removeprefix("Bearer "),
            self.headers.get("x-api-key", ""),
            self.headers.get("x-goog-api-key", ""),
        ]
        if not any(secrets.compare_digest(key.encode(), self.server.key.encode()) for key in given):
            self._refuse(401, "wrong or missing API key", "invalid_api_key")
        elif self._route not in routes:
            self._refuse(404, f"no such route: {self.path}", "not_found")
        else:
            return True
        return False

    def _body(self) -> bytes | None:
        size = self.headers.get("Content-Length", "")
        if not size:
            self._refuse(411, "Content-Length must be given; chunked bodies are not read", "no_length")
            return None
        if not (size.isascii() and size.isdigit() and len(size) < 20) or int(size) > MAX_BYTES:
            why = f"Content-Length must be at most {MAX_BYTES}, not {size[:20]!r}"
            self.server.recorder.refuse(ExitStatus.CONTEXT, why)
            self._refuse(413, why, "too_large")
            return None
        body = self.rfile.read(int(size))
        return _without_halves(body) if len(body) == int(size) else None

    def _end(self, status: ExitStatus, message: str, code: str) -> None:
        recorder = self.server.recorder
        is_side_request = recorder.is_side_request(status, self._asked.messages, self._asked.tools)
        recorder.refuse(status, message, is_side_request=is_side_request)
        self._refuse(400, message, code)

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Refuse a request in the form that all dialects share."""
        kind = KINDS.get(status) or ("invalid_request_error" if status < 500 else "server_error")
        error = {"message": message, "type": kind, "param": None, "code": code}
        self._send(status, {"type": "error", "error": error})

    def _send(self, status: int, value: object) -> None:
        data = msgspec.json.encode(value)
        self._head(status, "application/json", len(data))
        self.wfile.write(data)

    def _head(self, status: int, kind: str, size: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if size is not None:
            self.send_header("Content-Length", str(size))
        self.send_header("Connection", "close")
        if status > 400:  # with 400, which no client repeats, qwen-code would not sum up a full context
            self.send_header("x-should-retry", "false")  # OpenAI's and Anthropic's clients obey it
        if status >= 400:
            self.send_header("retry-after-ms", "1")  # for OpenCode, which repeats a request five times
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)
