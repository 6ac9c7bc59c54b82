"""Plays written replies over vLLM's routes, for tests.

All but the sampling is the real thing: the client, the token before every route, the pause around an
update, the stamps. `python -m hpc_swe.plugins.engines.scripted HOST PORT REPLIES` is the server.
"""

import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
from msgspec import Struct

from hpc_swe.errors import ConfigError
from hpc_swe.plugins.engines._answers import UNTOUCHED, Card
from hpc_swe.plugins.engines.vllm import BACKEND, TOKEN, Vllm
from hpc_swe.records import Record
from hpc_swe.store import folders

SCORE = -1.0
"""Log-probability of every token that is scored."""


class ScriptedReply(Record, frozen=True, kw_only=True):
    """What to answer; all are given in turn, round and round.

    Example: a file of replies is one JSON list

        [{"token_ids": [5, 6, 2], "logprobs": [-0.5, -0.25, -1.0], "finish_reason": "stop"}]
    """

    token_ids: list[int] = []
    logprobs: list[float] = []
    finish_reason: str = "stop"
    status: int = 200
    delay_s: float = 0.0


class Scripted(Vllm, frozen=True, kw_only=True):
    """An engine that has learnt its answers by heart."""

    loads_weights: ClassVar[bool] = False
    device: Literal["gpu", "cpu"] = "cpu"
    replies: str
    """Path of a JSON list of `ScriptedReply`."""
    plain: bool = False
    """Without routes for updates, as somebody else's engine may be."""
    update_s: float = 0.0
    """Seconds that a swap of weights takes."""

    def command(self, model: Path, host: str, port: int, name: str) -> Sequence[str]:
        """Argument vector of this module's server."""
        if not Path(self.replies).is_file():
            raise ConfigError(f"[engine] replies = {self.replies!r}: no such file")
        words = [host, str(port), self.replies, str(model), str(self.max_model_len)]
        words += ["plain"] * self.plain + [f"{self.update_s:g}"] * bool(self.update_s)
        return [sys.executable, "-m", "hpc_swe.plugins.engines.scripted", *words]


class _Settings(Struct, frozen=True):
    max_tokens: int
    prompt_logprobs: int | None = None


class _Question(Struct, frozen=True):
    token_ids: list[int]
    sampling_params: _Settings


class _Update(Struct, frozen=True):
    path: str = ""
    files: dict[str, tuple[int, int, int]] = {}


class _Order(Struct, frozen=True):
    """The body of any control route."""

    update_info: _Update = _Update()
    weight_version: str | None = None
    new_version: str | None = None


class _Stage:
    """What the server's threads share."""

    def __init__(
        self, replies: list[ScriptedReply], token: str, card: Card, plain: bool, update_s: float = 0.0
    ) -> None:
        self.token, self.version, self.card, self.is_plain = token, UNTOUCHED, card, plain
        self._update_s = update_s
        self.running = threading.Event()
        self.running.set()
        self._replies = cycle(replies)
        self._lock = threading.Lock()

    def reply(self) -> ScriptedReply:
        with self._lock:
            return next(self._replies, ScriptedReply(status=404))

    def control(self, path: str, order: _Order) -> None:
        """Raises ValueError for a folder whose files are not those that were verified."""
        if path == "/update_weights":
            for name, seen in order.update_info.files.items():
                with (Path(order.update_info.path) / name).open("rb") as file:
                    if folders.identity(file.fileno()) != seen:
                        raise ValueError(f"{name}: it is no longer the file that was verified")
        elif path == "/finish_weight_update":
            time.sleep(self._update_s)
        elif path in ("/pause", "/resume"):
            self.running.clear() if path == "/pause" else self.running.set()
        self.version = order.weight_version or order.new_version or self.version


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, stage: _Stage, *arguments: object) -> None:
        self._stage = stage
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answers: dict[str, dict[str, object]] = {"/health": {}, "/v1/models": {"data": [self._stage.card]}}
        if not self._stage.is_plain:
            transfer = {"weight_transfer_config": {"backend": BACKEND}}
            answers["/server_info"] = {"vllm_config": transfer}
            answers["/weight_info"] = {"weight_version": self._stage.version}
        if path != "/health" and not self._is_known():
            self._send(401, {})
        else:
            self._send(200 if path in answers else 404, answers.get(path, {}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if not self._is_known():
            self._send(401, {})
        elif path == "/inference/v1/generate":
            self._generate(msgspec.json.decode(body, type=_Question))
        elif self._stage.is_plain:
            self._send(404, {})
        else:
            self._control(path, msgspec.json.decode(body, type=_Order))

    def log_message(self, format: str, *_: object) -> None:
        """Quiet."""

    def _control(self, path: str, order: _Order) -> None:
        try:
            self._stage.control(path, order)
        except (OSError, ValueError) as error:
            self._send(500, {"error": {"message": str(error)}})
        else:
            self._send(200, {})

    def _generate(self, question: _Question) -> None:
        is_score = question.sampling_params.prompt_logprobs is not None
        prompt = question.token_ids
        reply = ScriptedReply(token_ids=[0], logprobs=[SCORE]) if is_score else self._stage.reply()
        time.sleep(reply.delay_s)
        self._stage.running.wait()
        ids = reply.token_ids[: question.sampling_params.max_tokens]
        choice = {
            "token_ids": ids,
            "finish_reason": reply.finish_reason if ids == reply.token_ids else "length",
            "logprobs": {
                "content": [{"token_id": i, "logprob": p} for i, p in zip(ids, reply.logprobs, strict=False)]
            },
            "weight_versions": [{"version": self._stage.version, "start": 0, "end": len(ids)}] if ids else [],
        }
        rows = [None, *({str(i): {"logprob": SCORE}} for i in prompt[1:])] if is_score else None
        self._send(reply.status, {"choices": [choice], "prompt_logprobs": rows})

    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self._stage.token}"

    def _send(self, status: int, answer: dict[str, object]) -> None:
        data = msgspec.json.encode(answer)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(host: str, port: str, replies: str, model: str, *rest: str) -> None:
    """Serve until killed."""
    max_model_len, *options = rest
    update_s = sum(float(word) for word in options if word != "plain")
    found = msgspec.json.decode(Path(replies).read_bytes(), type=list[ScriptedReply])
    stage = _Stage(found, os.environ[TOKEN], Card(model, int(max_model_len)), "plain" in options, update_s)
    ThreadingHTTPServer((host, int(port)), partial(_Handler, stage)).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
