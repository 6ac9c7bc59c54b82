"""Serve prepared replies over the routes of our vLLM, for tests.

Everything but the sampling is real: the client, the token on every route, the pause around an update, the
stamps. `python -m hpc_swe.models.engines.scripted HOST PORT REPLIES MODEL CONTEXT` is the server.
"""

import io
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Struct

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import EngineStages, Record
from hpc_swe.base.store import folders
from hpc_swe.models.engines._answers import (
    INITIAL,
    ModelCard,
    SampleAnswer,
    SampleRequest,
    Stamp,
    TokenScores,
)
from hpc_swe.models.engines._vllm.environment import BACKEND, TOKEN
from hpc_swe.models.engines._vllm.gate import SAMPLE
from hpc_swe.models.engines.vllm import Vllm

SCORE = -1.0  # log-probability of every scored token
FAULTS = "SCRIPTED_FAULTS"
"""A variable of words for [engine] environ. plain: serve no routes for updates, as an engine that somebody
else runs may do. one_way: fail when the weights before are to be loaded again. A number: seconds that a swap
of weights takes."""


class ScriptedReply(Record, frozen=True, kw_only=True):
    """Hold one reply; the server gives the replies of its file in turn and then starts again.

    Example: a file of replies is one JSON list

        [{"token_ids": [5, 6, 2], "logprobs": [-0.5, -0.25, -1.0], "finish_reason": "stop"}]
    """

    token_ids: list[int] = []
    logprobs: list[float] = []
    finish_reason: str = "stop"
    status: int = 200
    delay_s: float = 0.0


class Scripted(Vllm, frozen=True, kw_only=True):
    """Replay prepared replies."""

    loads_weights: ClassVar[bool] = False
    device: Literal["gpu", "cpu"] = "cpu"
    replies: str
    """Path of a JSON list of `ScriptedReply`."""

    def command(self, model: Path, host: str, port: int, name: str, context: int) -> Sequence[str]:
        if not Path(self.replies).is_file():
            raise ConfigError(f"[engine] replies = {self.replies!r}: no such file")
        words = [host, str(port), self.replies, str(model), str(context)]
        return [sys.executable, "-P", "-m", "hpc_swe.models.engines.scripted", *words]


class _Update(Struct, frozen=True):
    path: str = ""
    files: dict[str, tuple[int, int, int]] | None = None


class _ControlRequest(Struct, frozen=True):
    """Hold the body of a request to any control route."""

    update_info: _Update = _Update()
    weight_version: str | None = None
    new_version: str | None = None


@dataclass
class _State:
    """Hold the state that the server's threads share."""

    replies: Iterator[ScriptedReply]
    token: str
    card: ModelCard
    is_plain: bool
    update_s: float
    is_one_way: bool
    version: str = INITIAL
    running: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.running.set()

    def control(self, path: str, request: _ControlRequest) -> None:
        """Carry out a control request; raise ValueError if a weight file changed since it was verified."""
        if path == "/update_weights" and self.is_one_way and not request.update_info.path:
            raise ValueError("the weights before cannot be loaded")
        if path == "/update_weights":
            for name, seen in (request.update_info.files or {}).items():
                with (Path(request.update_info.path) / name).open("rb") as file:
                    if folders.identity(file.fileno()) != seen:
                        raise ValueError(f"{name}: it is no longer the file that was verified")
        elif path == "/finish_weight_update":
            time.sleep(self.update_s)
        elif path in ("/pause", "/sleep"):
            self.running.clear()
        elif path in ("/resume", "/wake_up"):
            self.running.set()
        self.version = request.weight_version or request.new_version or self.version


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, state: _State, *arguments: object) -> None:
        self._state = state
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answers: dict[str, dict[str, object]] = {"/health": {}, "/v1/models": {"data": [self._state.card]}}
        if not self._state.is_plain:
            answers["/server_info"] = {"vllm_config": {"weight_transfer_config": {"backend": BACKEND}}}
            answers["/weight_info"] = {"weight_version": self._state.version}
            answers["/is_sleeping"] = {"is_sleeping": not self._state.running.is_set()}
        if path != "/health" and not self._has_token():
            self._send(401, {})
        else:
            self._send(200 if path in answers else 404, answers.get(path, {}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if not self._has_token():
            self._send(401, {})
        elif self._state.is_plain and path == "/v1/completions":
            settings = msgspec.json.decode(body, type=dict[str, Any])
            status, found = self._sample(SampleRequest(settings["prompt"], settings))
            self._send(status, _as_text(found, settings["prompt"]))
        elif self._state.is_plain:
            self._send(404, {})
        elif path == SAMPLE:
            status, found = self._sample(msgspec.json.decode(body, type=SampleRequest))
            self._send(status, msgspec.msgpack.encode(found))
        else:
            self._control(path, msgspec.json.decode(body, type=_ControlRequest))

    def log_message(self, format: str, *_: object) -> None:
        """Log nothing."""

    def _control(self, path: str, request: _ControlRequest) -> None:
        try:
            self._state.control(path, request)
        except (OSError, ValueError) as error:
            self._send(500, {"error": {"message": str(error)}})
        else:
            answer: dict[str, object] = {"results": [{"is_staged": True, "bytes": 0}]}
            self._send(200, answer if path == "/collective_rpc" else {})

    def _sample(self, request: SampleRequest) -> tuple[int, SampleAnswer]:
        settings, prompt = request.sampling_params, request.token_ids
        is_score = "prompt_logprobs" in settings
        score = ScriptedReply(token_ids=[0], logprobs=[SCORE])
        # `next` of a cycle is one call in C, so threads share it without a lock
        reply = score if is_score else next(self._state.replies, ScriptedReply(status=404))
        time.sleep(reply.delay_s)
        self._state.running.wait()
        ids = reply.token_ids[: settings["max_tokens"]]
        start = settings.get("routed_experts_prompt_start")
        return reply.status, SampleAnswer(
            token_ids=ids,
            sampled=TokenScores.of(ids, reply.logprobs[: len(ids)]),
            finish_reason=reply.finish_reason if ids == reply.token_ids else "length",
            prompt=TokenScores.of(prompt[1:], [SCORE] * (len(prompt) - 1)) if is_score else None,
            weight_versions=[Stamp(self._state.version, 0, len(ids))] if ids else [],
            routed_experts=None if start is None else _routing((prompt + ids)[start:-1]),
            stages=EngineStages(decode_s=reply.delay_s, prompt_tokens=len(prompt)),
        )

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self._state.token}"

    def _send(self, status: int, answer: dict[str, object] | bytes) -> None:
        data = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _as_text(answer: SampleAnswer, prompt: Sequence[int]) -> dict[str, object]:
    choice: dict[str, object] = {
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "logprobs": {"token_logprobs": answer.sampled.of_tokens(answer.token_ids)},
        "routed_experts": answer.routed_experts,  # bytes are base64 in JSON
    }
    if answer.prompt is not None:
        choice["prompt_logprobs"] = [None, *({str(i): {"logprob": SCORE}} for i in prompt[1:])]
    return {"choices": [choice]}


def _routing(ids: Sequence[int]) -> bytes:
    """Return a numpy file with the experts of two layers: each token's id and its half, mod 8."""
    array = np.asarray([[[i % 8], [i // 2 % 8]] for i in ids], np.uint8).reshape(len(ids), 2, 1)
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def main(host: str, port: str, replies: str, model: str, context: str) -> None:
    """Serve until killed."""
    options = os.environ.get(FAULTS, "").split()
    update_s = sum(float(word) for word in options if word not in ("plain", "one_way"))
    found = msgspec.json.decode(Path(replies).read_bytes(), type=list[ScriptedReply])
    card = ModelCard(model, int(context))
    flags = ("plain" in options, update_s, "one_way" in options)
    state = _State(cycle(found), os.environ[TOKEN], card, *flags)
    ThreadingHTTPServer((host, int(port)), partial(_Handler, state)).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
