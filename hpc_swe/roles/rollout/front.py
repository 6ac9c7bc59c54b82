"""The recorder as an OpenAI-style server, for command-line agents: /v1/chat/completions and /v1/models.

One server an episode, on a Unix socket or a port of this host. Only messages and tools are taken from
a request; whatever else shapes the sampling is the recorder's, so it is ignored and counted.
"""

import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from hpc_swe.errors import AgentError, EpisodeError, SandboxError, boundary
from hpc_swe.plugins.agents.base import ContextFull
from hpc_swe.records import Message, ToolCall

if TYPE_CHECKING:
    from hpc_swe.roles.rollout.recorder import Exchange, Recorder

MOST_BYTES = 64 * 1024**2
TAKEN = {"model", "messages", "tools", "stream", "stream_options", "user", "metadata", "store"}
"""Fields that are honoured or mean nothing; every other one is a setting that is ignored."""
ROLES = {"developer": "system", "function": "tool"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Where a client finds the server, and with which key."""

    url: str
    """Of a Unix socket its path."""
    key: str


class _Text(Struct):
    text: str = ""


class _Function(Struct):
    name: str
    arguments: str = "{}"


class _Call(Struct):
    function: _Function


class _Said(Struct):
    role: str
    content: str | list[_Text] | None = None
    tool_calls: list[_Call] | None = None


class _StreamOptions(Struct):
    include_usage: bool = False


class _Request(Struct):
    messages: list[_Said]
    tools: Raw = Raw(b"null")
    stream: bool = False
    stream_options: _StreamOptions | None = None


@contextmanager
def serve(recorder: "Recorder", at: Path | None = None) -> Iterator[Address]:
    """Serve until the block ends, on a socket at `at` or a free port of this host."""
    server: _Port | _Socket
    with boundary(SandboxError, f"listen on {at or 'a free port'}"):
        server = _Socket(str(at), _Handler) if at else _Port(("127.0.0.1", 0), _Handler)
    server.recorder, server.key = recorder, secrets.token_hex(16)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="front", daemon=True)
    thread.start()
    try:
        yield Address(str(at) if at else f"http://127.0.0.1:{server.socket.getsockname()[1]}/v1", server.key)
    finally:
        server.shutdown()
        server.server_close()
        if at:
            at.unlink(missing_ok=True)


class _Recording:
    recorder: "Recorder"
    key: str
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        log.exception("broken request")


class _Port(_Recording, ThreadingHTTPServer):
    pass


class _Socket(_Recording, ThreadingMixIn, UnixStreamServer):
    pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any
    connection: socket.socket

    def do_GET(self) -> None:
        if self._is_allowed("/v1/models"):
            self._send(200, {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0}]})

    def do_POST(self) -> None:
        recorder: Recorder = self.server.recorder
        body = self._body()
        if body is None or not self._is_allowed("/v1/chat/completions"):
            return
        try:
            request = msgspec.json.decode(body, type=_Request)
            recorder.ignore(len(msgspec.json.decode(body, type=dict[str, Raw]).keys() - TAKEN))
            tools = "" if bytes(request.tools) in (b"null", b"[]") else bytes(request.tools).decode()
            exchange = recorder.ask([_message(said) for said in request.messages], tools)
        except ContextFull as error:
            self._refuse(400, str(error), "context_length_exceeded")
        except (msgspec.DecodeError, UnicodeDecodeError, AgentError) as error:
            self._refuse(400, str(error), "invalid_request")
        except EpisodeError as error:
            self._refuse(503, str(error), "engine")
        else:
            self._answer(request, exchange)

    def _answer(self, request: _Request, exchange: "Exchange") -> None:
        """Delivered before it is sent: the next request may come before the last write returns."""
        recorder: Recorder = self.server.recorder
        if self._is_gone():
            return
        recorder.deliver(exchange)
        try:
            if request.stream:
                usage = request.stream_options is not None and request.stream_options.include_usage
                self._stream(_chunks(exchange, usage))
            else:
                self._send(200, _completion(exchange))
        except OSError as error:
            log.info("undelivered reply: %s", error)
            recorder.retract(exchange)
            self.close_connection = True

    def _is_gone(self) -> bool:
        """A closed peer does not fail the first write, only the second."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        self.close_connection = bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""
        return self.close_connection

    def _is_allowed(self, path: str) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), self.server.key.encode()):
            self._refuse(401, "wrong or missing API key", "invalid_api_key")
        elif self.path.partition("?")[0] != path:
            self._refuse(404, f"no such route: {self.path}", "not_found")
        else:
            return True
        return False

    def _body(self) -> bytes | None:
        size = self.headers.get("Content-Length", "")
        if not size.isdigit() or int(size) > MOST_BYTES:
            self.close_connection = True
            self._refuse(413, f"Content-Length must be given and at most {MOST_BYTES}", "too_large")
            return None
        return self.rfile.read(int(size))

    def _refuse(self, status: int, message: str, code: str) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        self._send(status, {"error": {"message": message, "type": kind, "param": None, "code": code}})

    def _send(self, status: int, value: object) -> None:
        data = msgspec.json.encode(value)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, chunks: list[dict[str, object]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        lines = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks]
        self.wfile.write(b"".join(lines) + b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


def _message(said: _Said) -> Message:
    content = said.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    calls = [ToolCall(name=c.function.name, arguments=c.function.arguments) for c in said.tool_calls or []]
    fields = {"role": ROLES.get(said.role, said.role), "content": text, "tool_calls": calls}
    return msgspec.convert(fields, Message)


def _head(exchange: "Exchange", kind: str) -> dict[str, object]:
    return {"id": f"turn-{exchange.index}", "object": kind, "created": int(time.time()), "model": "policy"}


def _said(exchange: "Exchange") -> dict[str, object]:
    calls: list[dict[str, object]] = [
        {
            "index": number,
            "id": f"call_{exchange.index}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(exchange.reply.tool_calls)
    ]
    said: dict[str, object] = {"role": "assistant", "content": exchange.reply.content}
    return said | ({"tool_calls": calls} if calls else {})


def _finish(exchange: "Exchange") -> str:
    if exchange.reply.tool_calls:
        return "tool_calls"
    return "length" if exchange.reply.truncated else "stop"


def _usage(exchange: "Exchange") -> dict[str, int]:
    prompt, completion = exchange.prompt_tokens, exchange.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _completion(exchange: "Exchange") -> dict[str, object]:
    choice = {"index": 0, "message": _said(exchange), "finish_reason": _finish(exchange), "logprobs": None}
    return _head(exchange, "chat.completion") | {"choices": [choice], "usage": _usage(exchange)}


def _chunks(exchange: "Exchange", usage: bool) -> list[dict[str, object]]:
    head = _head(exchange, "chat.completion.chunk")
    first = {"index": 0, "delta": _said(exchange), "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": _finish(exchange)}
    chunks = [head | {"choices": [first]}, head | {"choices": [last]}]
    return [*chunks, head | {"choices": [], "usage": _usage(exchange)}] if usage else chunks
