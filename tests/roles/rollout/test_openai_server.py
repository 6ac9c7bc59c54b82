"""The recorder as a server, as a command-line agent finds it."""

import contextlib
import gc
import http.client
import json
import math
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

import httpx
import pytest

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.agents.loops.base import ChatAddress
from hpc_swe.base.errors import EngineError
from hpc_swe.base.records import ExitStatus, Sampling
from hpc_swe.base.rundir import RunDir
from hpc_swe.roles.rollout import openai_server
from tests.kit.recording import Stage, stage
from tests.kit.toy_model import HERMES, make_model
from tests.kit.waiting import DEADLINE_S

START = [
    {"role": "system", "content": "Repair."},
    {"role": "user", "content": [{"type": "text", "text": "It fails."}]},
]
TOOLS = [
    {"type": "function", "function": {"name": "view", "parameters": {"type": "object", "properties": {}}}}
]
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module", autouse=True)
def without_garbage_of_others() -> None:
    """Collect what earlier tests left open, so that it is not taken for a leak of the server."""
    report, sys.unraisablehook = sys.unraisablehook, lambda _: None
    gc.collect()
    sys.unraisablehook = report


@pytest.fixture
def on(run: RunDir, builder: TokenBuilder) -> Stage:
    return stage(run, builder, context=2000, wait_s=0.3)


@pytest.fixture
def address(on: Stage) -> Iterator[ChatAddress]:
    with on.recorder.serve(free_port(), most_turns=40) as address:
        yield address


def free_port() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def post(address: ChatAddress, **body: object) -> httpx.Response:
    return post_raw(address, json=body)


def post_raw(address: ChatAddress, **content: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {address.key}"}
    url = f"{address.url}/chat/completions"
    return httpx.post(url, headers=headers, trust_env=False, timeout=DEADLINE_S, **content)


def observed(answer: dict) -> list[dict]:
    """What a client sends next: its own spelling of the call, and the tool's answer."""
    call = answer["tool_calls"][0]
    spelled = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    function = {"name": call["function"]["name"], "arguments": spelled}
    said = {"role": "assistant", "content": answer["content"], "tool_calls": [call | {"function": function}]}
    return [said, {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "1: x"}]}]


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (r"cut \ud83d", "cut \ufffd"),
        (r"\uDE00 after", "\ufffd after"),
        (r"whole \ud83d\ude00", "whole \U0001f600"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"a path \\ud83d", r"a path \ud83d"),
    ],
)
def test_half_a_character_in_a_history_ends_no_session(on, address, sent, read):
    body = '{"messages": [{"role": "user", "content": "' + sent + '"}]}'
    answer = post_raw(address, content=body)
    assert answer.status_code == 200, answer.text
    assert on.recorder.messages[0].content == read


def test_streams_carry_the_same(on, address):
    answer = post(address, messages=START, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"] == "text/event-stream"
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    delta = chunks[0]["choices"][0]["delta"]
    assert delta["tool_calls"][0]["function"]["name"] == "view"
    assert delta["tool_calls"][0]["index"] == 0
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, "tool_calls"]
    assert chunks[-1]["usage"]["prompt_tokens"] == len(on.engine.calls[0].prompt)
    assert chunks[-1]["usage"]["completion_tokens"] == len(on.recorder.close("")[0].completion)
    assert "usage" not in post(address, messages=START, stream=True).text


def test_a_clients_sampling_is_ignored_and_counted(on, address):
    settings = {
        "temperature": 0.1,
        "top_p": 0.5,
        "stop": ["x"],
        "max_tokens": 1,
        "seed": 3,
        "logit_bias": {"1": 5},
        "response_format": {"type": "json_object"},
        "n": 4,
        "tool_choice": "required",
    }
    post(address, messages=START, model="gpt", stream=False, **settings)
    assert on.engine.calls[0].sampling == Sampling(max_tokens=200)
    assert on.recorder.counts["ignored_settings"] == len(settings)


def test_errors_are_those_of_the_protocol(on, address, builder, run):
    def error(answer: httpx.Response) -> tuple[int, str, str]:
        return answer.status_code, answer.json()["error"]["type"], answer.json()["error"]["code"]

    invalid = (400, "invalid_request_error", "invalid_request")
    assert error(post(address, messages=[{"role": "user", "content": "x " * 9000}])) == (
        400, "invalid_request_error", "context_length_exceeded",
    )  # fmt: skip
    assert error(post(address, messages=[{"role": "clown", "content": "x"}])) == invalid
    assert error(post(address, prompt="x")) == invalid
    assert error(post(ChatAddress(address.url, "guess"), messages=START))[0] == 401
    assert error(post(ChatAddress(f"{address.url}/other", address.key), messages=START))[0] == 404
    assert on.recorder.failure is None
    on.engine.faults = deque([EngineError("gone")] * 50)
    assert error(post(address, messages=START)) == (503, "server_error", "engine")
    assert isinstance(on.recorder.failure, EngineError), "the program may exit 0 all the same"
    assert error(post(address, messages=START))[0] == 503


def test_a_huge_request_is_refused(address):
    connection = http.client.HTTPConnection(address.url.split("/")[2])
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Length", str(10**12))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_no_more_to_ask_is_answered(on, address, stream):
    host, port = address.url.split("/")[2].split(":")
    body = json.dumps({"messages": START, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {address.key}\r\n"
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as answer:
            assert b"Look." in answer.read()
    assert [turn.delivered for turn in on.recorder.close("")] == [True]


def test_a_body_without_a_length_is_refused_in_words_that_help(address):
    answer = post_raw(address, content=iter([b"{}"]))
    assert answer.status_code == 411
    assert "chunked" in answer.json()["error"]["message"]


def test_after_the_episode_nobody_is_answered(on):
    with on.recorder.serve(free_port(), most_turns=9) as address:
        post(address, messages=START)
        on.recorder.close("over")
        assert post(address, messages=START).status_code == 503
        assert on.recorder.clock() == math.inf, "what still runs is ended"
    with pytest.raises(httpx.ConnectError):
        post(address, messages=START)


def test_the_recorder_counts_the_turns_itself(on):
    with on.recorder.serve(free_port(), most_turns=2) as address:
        answers = [post(address, messages=[{"role": "user", "content": str(n)}]) for n in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 400]
    assert answers[3].json()["error"]["code"] == "turns_spent"
    assert on.recorder.refusal is not None
    assert on.recorder.refusal.status == ExitStatus.MAX_TURNS
    assert len(on.recorder.close("")) == len(on.engine.calls) == 2


def test_threads_cannot_get_more_turns_than_there_are(on):
    on.engine.on_call = lambda call: time.sleep(0.05)
    with on.recorder.serve(free_port(), most_turns=3) as address:
        threads = [
            threading.Thread(target=post, args=(address,), kwargs={"messages": START})
            for _ in range(openai_server.MAX_CONNECTIONS)  # one more would be refused
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(on.recorder.close("")) == 3


def test_a_call_the_template_refuses_is_a_side_call_despite_its_prompt(run, tmp_path):
    picky = (
        "{%- if messages[1:] and messages[-1].role == 'system' %}{{ raise_exception('late') }}{%- endif %}"
    )
    on = stage(run, TokenBuilder(make_model(tmp_path / "picky", picky + HERMES)), context=2000)
    with on.recorder.serve(free_port(), most_turns=40) as address:
        history = [*START, *observed(post(address, messages=START).json()["choices"][0]["message"])]
        assert post(address, messages=history).status_code == 200
        late = {"role": "system", "content": "A title."}
        for messages, is_side_request in (([START[0], late], True), ([*history, late], False)):
            assert post(address, messages=messages).status_code == 400
            assert on.recorder.refusal is not None
            assert on.recorder.refusal.status == ExitStatus.AGENT_ERROR
            assert on.recorder.refusal.is_side_request == is_side_request


def test_the_policy_keeps_only_its_own_agent_waiting(on):
    """Half requests, endless headers, silence, floods: served again when they are given up."""
    listener = free_port()
    before = threading.active_count()
    head = b"POST /v1/chat/completions HTTP/1.1\r\n"
    starts = [b"", b"\0" * 70_000, head, head + b"X: y\r\n" * 50, head + b"Content-Length: 9\r\n\r\n{"]
    with on.recorder.serve(listener, 10_000, read_s=0.5) as address:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(100)]
        for client, start in zip(clients, starts * 20, strict=True):
            with contextlib.suppress(OSError):
                client.sendall(start)
        assert threading.active_count() <= before + 1 + openai_server.MAX_CONNECTIONS
        until = time.monotonic() + DEADLINE_S
        status = 0
        while status != 200:
            assert time.monotonic() < until, "the front does not serve any more"
            with contextlib.suppress(httpx.TransportError):
                status = post(address, messages=START).status_code
        for client in clients:
            client.close()
    assert on.recorder.failure is None
    assert on.recorder.refusal is None


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": ' + b"[" * 100_000,
        b'{"messages": [], "x": ' + b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "['
        + b"[" * 100_000
        + b'"}}]}]}',
        b'{"messages": [{"role": "user", "content": [' + b"{}," * 1_300_000 + b"{}]}]}",
        b'{"messages": [' + b'{"role":"user"},' * 200_000 + b'{"role":"user"}]}',
        b'{"messages": [{"role": "user", "content": "' + b" " * 4_000_000 + b'"}]}',
        b'{"messages": [{"role": "user"}], "tools": {"a": 1}}',
        b'{"messages": [{"role": "user"}], "tools": [1, "x", null]}',
    ],
)
def test_no_body_breaks_the_front(on, address, body):
    answer = post_raw(address, content=body)
    assert answer.status_code in (200, 400)
    assert post(address, messages=START).status_code == 200
    assert on.recorder.failure is None
