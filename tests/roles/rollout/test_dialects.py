"""Agent programs of each dialect before the recorder: whole sessions, what breaks them off, and nonsense."""

import copy
import json
import random
import re
import socket
import threading
import tracemalloc
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import httpx
import msgspec
import pytest

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.agents.loops.base import ChatAddress
from hpc_swe.base.records import ExitStatus
from hpc_swe.base.rundir import RunDir
from hpc_swe.roles.rollout.dialects.anthropic_messages import AnthropicMessages
from tests.kit.recording import Stage, exact, stage
from tests.kit.waiting import DEADLINE_S, until

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
LATE = "The tests are slow today."


class Program(ABC):
    """An agent program's history in one dialect; it completes the arguments of calls by a default."""

    route: str
    ignored, dropped = 0, 1
    """Settings without effect and tools of other kinds, of one request."""

    def __init__(self, address: ChatAddress, task: str = "It fails.", stream: bool = False) -> None:
        self.address, self.stream = address, stream
        self.body: dict = self.started(task)

    def post(self, **more: object) -> httpx.Response:
        return httpx.post(
            self.address.url + self.route,
            headers=self.headers(),
            json=self.body | {"model": "policy", "stream": self.stream} | more,
            trust_env=False,
            timeout=DEADLINE_S,
        )

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.address.key}"}

    def turn(self) -> str:
        """Ask, and take the answer and results of its calls into the history; return the answer's text."""
        response = self.post()
        assert response.status_code == 200, response.text
        answer = self.joined(events(response.text)) if self.stream else response.json()
        return self.extend(answer)

    @abstractmethod
    def started(self, task: str) -> dict: ...

    @abstractmethod
    def joined(self, events: list[dict]) -> dict:
        """The answer that a stream carries."""

    @abstractmethod
    def extend(self, answer: dict) -> str: ...


def events(text: str) -> list[dict]:
    """The data of a stream's events, whose names they repeat."""
    found = []
    for event in text.split("\n\n")[:-1]:
        *name, data = event.split("\n")
        if data == "data: [DONE]":
            break
        found.append(json.loads(data.removeprefix("data: ")))
        assert name in ([], [f"event: {found[-1].get('type')}"])
    return found


def completed(arguments: str) -> dict:
    return {"replace_all": False} | json.loads(arguments)


class Chat(Program):
    route = "/chat/completions"
    dropped = 0

    def started(self, task: str) -> dict:
        tool = {"type": "function", "function": {"name": "view", "parameters": SCHEMA}}
        history = [{"role": "system", "content": "Repair."}, {"role": "user", "content": task}]
        return {"messages": history, "tools": [tool]}

    def joined(self, events: list[dict]) -> dict:
        first, last = (event["choices"][0] for event in events)
        return {"choices": [{"message": first["delta"], "finish_reason": last["finish_reason"]}]}

    def extend(self, answer: dict) -> str:
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        assert answer["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")
        for call in calls:
            call["function"]["arguments"] = json.dumps(completed(call["function"]["arguments"]))
        seen = [{"role": "tool", "tool_call_id": call["id"], "content": "1: x"} for call in calls]
        self.body["messages"] += [message, *(seen or [{"role": "user", "content": "Go on."}])]
        return message["content"]


class Messages(Program):
    route = "/messages?beta=true"
    ignored = 1

    def headers(self) -> dict[str, str]:
        return {"x-api-key": self.address.key}

    def started(self, task: str) -> dict:
        tools = [
            {"name": "view", "description": "Look.", "input_schema": SCHEMA},
            {"type": "web_search_20250305", "name": "web_search"},
        ]
        history = [
            {"role": "user", "content": [{"type": "text", "text": task}]},
            {"role": "system", "content": LATE},
        ]
        system = [{"type": "text", "text": "Repair."}]
        return {"system": system, "messages": history, "tools": tools, "max_tokens": 7}

    def joined(self, events: list[dict]) -> dict:
        answer = events[0]["message"]
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
        for event in events:
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(answer["content"])
                    answer["content"].append(event["content_block"])
                    arguments = ""
                case "content_block_delta" if event["delta"]["type"] == "text_delta":
                    answer["content"][-1]["text"] += event["delta"]["text"]
                case "content_block_delta":
                    arguments += event["delta"]["partial_json"]
                case "content_block_stop" if arguments:
                    answer["content"][-1]["input"] = json.loads(arguments)
                case "message_delta":
                    answer |= event["delta"] | {"usage": event["usage"]}
        return answer

    def extend(self, answer: dict) -> str:
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert answer["stop_reason"] == ("tool_use" if calls else "end_turn")
        for call in calls:
            call["input"] = completed(json.dumps(call["input"]))
        seen = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "1: x"}]}
            for call in calls
        ]
        self.body["messages"] += [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": seen or "Go on."},
        ]
        return "".join(block.get("text", "") for block in answer["content"])


class Responses(Program):
    route = "/responses"

    def started(self, task: str) -> dict:
        tools = [
            {"type": "function", "name": "view", "strict": False, "parameters": SCHEMA},
            {"type": "web_search"},
        ]
        history = [
            {"type": "message", "role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": task}]},
            {"role": "developer", "content": LATE},
        ]
        return {"instructions": "Repair.", "input": history, "tools": tools}

    def joined(self, events: list[dict]) -> dict:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        deltas = "".join(event.get("delta", "") for event in events)
        texts = [item.get("arguments") or item["content"][0]["text"] for item in done]
        assert (events[-1]["type"], deltas) == ("response.completed", "".join(texts))
        assert events[-1]["response"]["output"] == done
        return events[-1]["response"]

    def extend(self, answer: dict) -> str:
        assert answer["status"] == "completed"
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        for call in calls:
            call["arguments"] = json.dumps(completed(call["arguments"]))
        seen = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "1: x"} for call in calls
        ]
        thought = {"type": "reasoning", "summary": [], "content": None}
        self.body["input"] += [thought, *answer["output"], *(seen or [{"role": "user", "content": "Go on."}])]
        return "".join(item["content"][0]["text"] for item in answer["output"] if item["type"] == "message")


class Gemini(Program):
    ignored = 2  # generationConfig, and stream, which the path says

    @property
    def route(self) -> str:  # after the v1 of the address
        return f"beta/models/any:{'streamGenerateContent?alt=sse' if self.stream else 'generateContent'}"

    def headers(self) -> dict[str, str]:
        return {"x-goog-api-key": self.address.key}

    def started(self, task: str) -> dict:
        view = {"name": "view", "description": "Look.", "parametersJsonSchema": SCHEMA}
        return {
            "systemInstruction": {"parts": [{"text": "Repair."}]},
            "contents": [{"role": "user", "parts": [{"text": task}]}],
            "tools": [{"functionDeclarations": [view]}, {"googleSearch": {}}],
            "generationConfig": {"temperature": 0},
        }

    def joined(self, events: list[dict]) -> dict:
        (answer,) = events
        return answer

    def extend(self, answer: dict) -> str:
        (candidate,) = answer["candidates"]
        assert candidate["finishReason"] == "STOP"
        calls = [part["functionCall"] for part in candidate["content"]["parts"] if "functionCall" in part]
        for call in calls:
            call["args"] = completed(json.dumps(call["args"]))
        seen = [
            {"functionResponse": {"name": call["name"], "id": call["id"], "response": {"output": "1: x"}}}
            for call in calls
        ]
        thought = {"text": "Is it m.py?", "thought": True}
        parts = [thought, *candidate["content"]["parts"]]
        self.body["contents"] += [
            {"role": "model", "parts": parts},
            {"role": "user", "parts": seen or [{"text": "Go on."}]},
        ]
        return "".join(part.get("text", "") for part in candidate["content"]["parts"])


DIALECTS = MappingProxyType({"chat": Chat, "messages": Messages, "responses": Responses, "gemini": Gemini})
dialects = pytest.mark.parametrize("dialect", DIALECTS)


@pytest.fixture
def on(run: RunDir, builder: TokenBuilder) -> Stage:
    return stage(run, builder, context=2000)


@pytest.fixture
def address(on: Stage) -> Iterator[ChatAddress]:
    with on.recorder.serve(socket.create_server(("127.0.0.1", 0)), most_turns=40) as address:
        yield address


@dialects
@pytest.mark.parametrize("stream", [False, True])
def test_a_session_is_one_exact_chain(on, address, dialect, stream):
    program = DIALECTS[dialect](address, stream=stream)
    assert [program.turn() for _ in range(3)] == ["Look.", "Mend.", "Done."]
    turns = exact(on.recorder.close("over"), on.engine)
    assert [(turn.parent, turn.delivered) for turn in turns] == [(None, True), (0, True), (1, True)]
    shown = on.builder.tokens.decode(on.engine.calls[0].prompt)
    assert '"name": "view"' in shown
    assert "web_search" not in shown
    assert on.recorder.counts["dropped"] == 3 * program.dropped
    assert on.recorder.counts["ignored_settings"] == 3 * program.ignored
    roles = [message.role for message in on.recorder.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    calls = [call.arguments for message in on.recorder.messages for call in message.tool_calls]
    assert calls == ['{"path": "m.py"}', '{"line": 3}'], "people see what the policy wrote"


@pytest.mark.parametrize("dialect", ["messages", "responses"])
def test_late_words_of_the_system_are_the_users(on, address, dialect):
    DIALECTS[dialect](address).turn()
    system = "Repair." if dialect == "messages" else "Repair.\n\nBe brief."
    messages = [(message.role, message.content) for message in on.recorder.messages[:2]]
    assert messages == [("system", system), ("user", f"It fails.\n\n{LATE}")]


def test_a_message_of_many_texts_takes_little_memory():
    result = {"type": "tool_result", "content": "1: x"}
    content = [*[{}] * 996, {"text": "a"}, {"text": "b"}, result, {"text": "c"}]
    body = {"messages": [{"role": "user", "content": content}] * 50}
    request = msgspec.convert(body, AnthropicMessages)
    tracemalloc.start()
    try:
        asked = request.conversation({})
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    found = [(message.role, message.content) for message in asked.messages[:3]]
    assert found == [("user", "a\n\nb"), ("tool", "1: x"), ("user", "c\n\na\n\nb")]


@dialects
def test_sub_agents_at_the_same_time_have_exact_chains(on, address, dialect):
    main = DIALECTS[dialect](address, stream=True)
    main.turn()
    subs = [DIALECTS[dialect](address, f"Look into {name}.", stream=True) for name in "ab"]
    threads = [threading.Thread(target=lambda sub=sub: [sub.turn() for _ in range(3)]) for sub in subs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    main.turn()
    turns = exact(on.recorder.close("over"), on.engine)
    assert (on.recorder.counts["chains"], len(turns), on.recorder.main) == (3, 8, 0)
    assert turns[-1].parent == 0


@dialects
def test_a_compressed_history_is_a_chain_of_its_own(on, address, dialect):
    program = DIALECTS[dialect](address)
    for _ in range(2):
        program.turn()
    program.body = program.started("Summary: it was repaired.")
    for _ in range(2):
        program.turn()
    assert [turn.parent for turn in exact(on.recorder.close("over"), on.engine)] == [None, 0, None, 2]


@dialects
def test_after_a_cut_connection_the_answer_that_came_is_extended(on, address, dialect):
    program, gone = DIALECTS[dialect](address), threading.Event()
    program.turn()
    on.engine.on_call = lambda call: gone.wait(DEADLINE_S) and None
    with socket.create_connection(("127.0.0.1", int(address.url.split(":")[2].split("/")[0]))) as client:
        head = [f"{name}: {value}" for name, value in program.headers().items()]
        body = json.dumps(program.body).encode()
        lines = [
            f"POST /v1{program.route} HTTP/1.1",
            "Host: x",
            *head,
            f"Content-Length: {len(body)}",
            "",
            "",
        ]
        client.sendall("\r\n".join(lines).encode() + body)
        until(lambda: len(on.engine.calls) == 2, "the request")
    gone.set()
    for _ in range(2):
        program.turn()
    turns = exact(on.recorder.close("over"), on.engine)
    assert on.recorder.counts["undelivered"] == 1
    assert sorted((turn.parent or 0, turn.delivered) for turn in turns) == [
        (0, False), (0, True), (0, True), (turns[-1].parent, True),
    ]  # fmt: skip
    assert turns[turns[-1].parent or 0].delivered


@dialects
def test_refusals_have_the_words_that_programs_look_for(on, address, dialect):
    def refused(program: Program, **more: object) -> tuple[int, str, str]:
        answer = program.post(**more)
        asked = None if answer.status_code == 400 else "false"
        assert answer.headers.get("x-should-retry") == asked, "or a program repeats it for minutes"
        body = answer.json()
        assert body["type"] == "error"
        return answer.status_code, body["error"]["type"], body["error"]["message"]

    speak = DIALECTS[dialect]
    assert refused(speak(ChatAddress(address.url, "guess")))[:2] == (401, "authentication_error")
    assert refused(speak(ChatAddress(f"{address.url}/v1", address.key)))[:2] == (404, "not_found_error")
    assert on.recorder.refusal is None
    kind = (400, "invalid_request_error")
    assert refused(speak(address), tools=5)[:2] == kind
    *found, why = refused(speak(address, "x " * 5000))
    assert (tuple(found), why.startswith("prompt is too long: the prompt's ")) == (kind, True)
    assert on.recorder.refusal is not None
    assert on.recorder.refusal.status == ExitStatus.CONTEXT
    on.recorder.turns_left = 0
    assert refused(speak(address)) == (*kind, "all turns of the episode are spent")
    on.recorder.close("over")
    assert refused(speak(address))[:2] == (503, "server_error")


@pytest.mark.parametrize(
    "name", ["previous_response_id", "conversation", "prompt", "cachedContent", "cached_content"]
)
def test_what_is_stored_nowhere_is_not_continued_silently(address, name):
    program = (Gemini if "cached" in name else Responses)(address)
    answer = program.post(**{name: "a"})
    assert answer.status_code == 400
    assert "send the whole history" in answer.json()["error"]["message"]
    assert program.post(**{name: None}).status_code == 200


def test_gemini_is_read_by_the_names_of_its_proto_too(on, address):
    """Google's examples of requests write these."""
    program = Gemini(address)
    for _ in range(3):
        keys = re.compile(r'"\w+":')
        proto = keys.sub(lambda key: re.sub("[A-Z]", r"_\g<0>", key[0]).lower(), json.dumps(program.body))
        program.body = json.loads(proto)
        program.turn()
    assert [turn.parent for turn in exact(on.recorder.close("over"), on.engine)] == [None, 0, 1]
    assert json.dumps(SCHEMA) in on.builder.tokens.decode(on.engine.calls[0].prompt)
    roles = [message.role for message in on.recorder.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]


NULL = {"name": "view", "parametersJsonSchema": None}


@pytest.mark.parametrize(
    ("dialect", "tool", "shown"),
    [
        ("gemini", {"functionDeclarations": [NULL | {"parameters": SCHEMA}]}, SCHEMA),
        ("gemini", {"functionDeclarations": [NULL]}, {}),
        ("responses", NULL | {"type": "function", "parameters": None}, {}),
    ],
)
def test_no_prompt_shows_the_parameters_of_a_tool_as_null(address, on, dialect, tool, shown):
    assert DIALECTS[dialect](address).post(tools=[tool]).status_code == 200
    prompt = on.builder.tokens.decode(on.engine.calls[0].prompt)
    assert f'"parameters": {json.dumps(shown)}' in prompt


def test_openais_own_client_reads_our_streams(address):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=address.url, api_key=address.key, max_retries=0) as client:
        body = Responses(address).body
        with client.responses.stream(model="policy", input=body["input"], tools=body["tools"]) as stream:
            answer = stream.get_final_response()
    assert (answer.output_text, answer.output[1].arguments) == ("Look.", '{"path": "m.py"}')


def test_a_client_that_only_looks_whether_somebody_listens_is_answered(address):
    assert httpx.head(address.url.removesuffix("/v1"), trust_env=False).status_code == 200


REQUESTS = 200  # of each dialect
JUNK = (None, 0, -1e308, "", "\ud800", "x" * 5000, [], {}, [[]], {"type": "text"}, [{"role": "user"}], True)


def places(value: object) -> list[tuple[dict | list, str | int]]:
    """Each place in a JSON value at which something else may stand."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def nonsense(program: Program, dice: random.Random) -> bytes:
    """A request with some of its parts replaced, or cut, or no JSON at all."""
    body = copy.deepcopy(program.body) | {"stream": dice.random() < 0.5}
    for _ in range(dice.randrange(4)):
        where, key = dice.choice(places(body))
        where[key] = copy.deepcopy(dice.choice([*JUNK, program.body["tools"], where[key]]))
        if dice.random() < 0.2:
            del where[key]
    data = json.dumps(body).encode()
    if dice.random() < 0.2:
        data = data[: dice.randrange(len(data))] + dice.randbytes(dice.randrange(4))
    return data


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@dialects
def test_nonsense_is_answered_or_refused_and_leaves_nothing(on, address, dialect):
    program, dice = DIALECTS[dialect](address), random.Random(0)
    program.turn()
    statuses: Counter[int] = Counter()
    with httpx.Client(trust_env=False, timeout=DEADLINE_S) as client:
        for number in range(REQUESTS):
            if number == REQUESTS // 4:
                before_mb = resident_mb()
            data = nonsense(program, dice)
            answer = client.post(address.url + program.route, headers=program.headers(), content=data)
            statuses[answer.status_code] += 1
            on.engine.calls.clear()
    assert set(statuses) == {200, 400}, statuses
    assert resident_mb() - before_mb < 30
    assert on.recorder.failure is None
    assert "Done" in DIALECTS[dialect](address).post().text or on.recorder.turns_left == 0
