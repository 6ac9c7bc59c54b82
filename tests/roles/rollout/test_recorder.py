"""The recorder: every trained token is one that an engine sampled, with its logprob and its weights."""

import dataclasses
import json
import math
import time
from collections import deque

import msgspec
import numpy as np
import pytest

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.agents.loops.base import ContextFull, Reply
from hpc_swe.base.errors import ConfigError, EngineError, SandboxError
from hpc_swe.base.records import (
    FREE,
    ExitStatus,
    Message,
    Node,
    Sampling,
    ToolCall,
    WeightVersion,
    float_array,
    id_array,
)
from hpc_swe.base.store import atomic
from hpc_swe.models.engines.base import Completion
from hpc_swe.roles.coordinator.batching.samples import add_routing, make_samples
from hpc_swe.roles.rollout.endpoints import Endpoints
from hpc_swe.roles.rollout.recorder import Recorder
from tests.kit.made_episodes import episode
from tests.kit.recording import REPLIES, V1, serve, stage
from tests.kit.toy_engine import Call, cut_at
from tests.kit.toy_model import HERMES, THINKING, make_model

V2, V3 = (WeightVersion(step=step) for step in (2, 3))
START = [Message(role="system", content="Repair."), Message(role="user", content="It fails.")]


def answer(reply: Reply) -> Message:
    return Message(role="assistant", content=reply.content, tool_calls=reply.tool_calls)


def tool(text: str) -> Message:
    return Message(role="tool", content=text)


def talk(recorder: Recorder, *observations: list[Message]) -> list[Message]:
    """An agent's loop: ask, act, ask."""
    history = list(START)
    for observed in observations:
        history += [answer(recorder(history)), *observed]
    return [*history, answer(recorder(history))]


def sequence(turns: list, index: int) -> list[int]:
    parts: list[list[int]] = []
    while index is not None:
        parts.append([*id_array(turns[index].appended_ids).tolist(), *turns[index].completion.tolist()])
        index = turns[index].parent
    return [token for part in reversed(parts) for token in part]


# Rule 5: loss only on ids that the engine returned, with their logprobs; rule 2: nothing is rendered twice.


@pytest.mark.parametrize("history", ["keep", "template"])
def test_every_token_has_the_experts_that_computed_it(run, builder, history):
    on = stage(run, builder, history=history)
    on.engine.routes = True
    on.engine.faults.append(cut_at(2))
    talk(on.recorder, [tool("1: x")], [tool("ok")])
    turns = on.recorder.close("over")
    found = make_samples(episode(turns), 1.0, "all", 0)
    for sample in add_routing(found, episode(turns), "all").samples:
        ids = id_array(sample.token_ids)
        experts = np.frombuffer(sample.routing, np.uint8).reshape(-1, 2)
        np.testing.assert_array_equal(experts[:-1], np.stack((ids % 7, ids % 11), -1)[:-1])
        assert experts[-1].tolist() == [FREE, FREE], "nothing computed the last token"


@pytest.mark.parametrize("template", [HERMES, THINKING])
def test_every_recorded_token_is_what_the_engine_saw_and_said(run, tmp_path, template):
    thinking = TokenBuilder(make_model(tmp_path / "model", template))
    replies = [f"<think>\nhm\n</think>\n\n{text}" for text in REPLIES] if template == THINKING else REPLIES
    on = stage(run, thinking, replies=replies)
    talk(
        on.recorder, [tool("1: x"), tool("<|im_end|>")], [tool("ok")], [Message(role="user", content="Sure?")]
    )
    turns = on.recorder.close("over")
    assert [turn.parent for turn in turns] == [None, 0, 1, 2]
    for index, (turn, call) in enumerate(zip(turns, on.engine.calls, strict=True)):
        assert call.answer is not None
        assert sequence(turns, index) == call.prompt + call.answer.token_ids
        assert turn.completion.tolist() == call.answer.token_ids
        np.testing.assert_array_equal(float_array(turn.logprobs), np.float32(call.answer.logprobs))
        assert [(s.start, s.end, s.oldest, s.newest) for s in turn.spans] == [
            (0, len(turn.completion), V1, V1)
        ]
        assert (turn.delivered, turn.finish_reason) == (True, "stop")
    text = thinking.tokens.decode(sequence(turns, 3))
    assert thinking.tokens.encode_whole(text) != sequence(turns, 3), "the engine's cuts were re-tokenized"
    assert text.count("<think>") == (4 if template == THINKING else 0)


# Rule 3: text never becomes control.


# Rule 1: the recorder owns the sampling settings.


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.7}])
def test_training_refuses_settings_that_the_logprobs_do_not_show(run, builder, setting):
    with pytest.raises(ConfigError, match="sampling"):
        stage(run, builder, sampling=Sampling(**setting))
    stage(run, builder, sampling=Sampling(**setting), split="eval")


def test_turns_say_what_they_were_sampled_with(run, builder):
    hot = Sampling(max_tokens=100, temperature=0.7)
    on = stage(run, builder, sampling=hot, split="eval", context=120)
    on.recorder(START)
    turn = on.recorder.close("")[0]
    assert turn.sampling == on.engine.calls[0].sampling
    assert turn.sampling == Sampling(temperature=0.7, max_tokens=120 - len(on.engine.calls[0].prompt))


# Rule 5: an aborted generation is continued and never reaches the agent.


def test_an_aborted_generation_is_continued_elsewhere(run, builder):
    on = stage(run, builder)

    def update(call: Call) -> None:
        if len(on.engine.calls) == 3:
            on.engine.version = V2

    on.engine.on_call = update
    on.engine.faults = deque([cut_at(4), EngineError("gone"), None])
    reply = on.recorder(START)
    assert [c.name for c in reply.tool_calls] == ["view"]
    (turn,) = on.recorder.close("")
    first, lost, last = on.engine.calls
    assert first.answer is not None
    assert last.answer is not None
    assert last.prompt == lost.prompt == first.prompt + first.answer.token_ids
    assert turn.completion.tolist() == first.answer.token_ids + last.answer.token_ids
    expected = np.float32(first.answer.logprobs + last.answer.logprobs)
    np.testing.assert_array_equal(float_array(turn.logprobs), expected)
    assert [(s.start, s.end, s.oldest) for s in turn.spans] == [(0, 4, V1), (4, len(turn.completion), V2)]
    assert lost.url != last.url, "the engine that failed rests"
    assert last.sampling.max_tokens == 200 - 4
    assert turn.sampling.max_tokens == 200
    assert on.recorder.counts["continued"] == 2


def test_an_abort_at_the_last_token_is_a_cut_turn(run, builder):
    on = stage(run, builder, sampling=Sampling(max_tokens=4))
    on.engine.faults = deque([cut_at(4)])
    assert on.recorder(START).truncated
    assert on.recorder.close("")[0].finish_reason == "length"


def test_a_wait_for_engines_ends_and_says_for_what(run, builder):
    on = stage(run, builder, wait_s=0.2)
    serve(run, newest=V3, a=[V1])
    with pytest.raises(EngineError, match=r"endpoints.json lists a at .*v000001.* of v000003"):
        on.recorder(START)
    assert isinstance(on.recorder.failure, EngineError)
    run.endpoints.unlink()
    with pytest.raises(EngineError, match="coordinator has not written"):
        stage(run, builder, wait_s=0.2).recorder(START)


def test_endless_aborts_end(run, builder):
    on = stage(run, builder, wait_s=0.3)
    on.engine.faults = deque([cut_at(0)] * 1000)
    with pytest.raises(EngineError, match="aborted every request"):
        on.recorder(START)


def bad_logprob(value: float) -> object:
    return lambda answer: dataclasses.replace(answer, logprobs=[value, *answer.logprobs[1:]])


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (bad_logprob(math.nan), "not finite"),
        (bad_logprob(-math.inf), "not finite"),
        (lambda answer: dataclasses.replace(answer, logprobs=answer.logprobs[1:]), "log-probabilities for"),
        (lambda answer: dataclasses.replace(answer, spans=[(1, len(answer.token_ids), V1)]), "spans"),
        (lambda answer: dataclasses.replace(answer, spans=[]), "spans"),
        (lambda answer: Completion([5] * 201, [-1.0] * 201, "length", None), "201 tokens where 200"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_an_engine_error(run, builder, fault, why):
    on = stage(run, builder)
    on.engine.faults = deque([fault])
    with pytest.raises(EngineError, match=why):
        on.recorder(START)
    assert len(on.engine.calls) == 1
    assert on.recorder.close("") == []


# Rule 4: versions as spans, engines that stick.


def test_an_engine_without_stamps_gets_the_interval_that_its_cell_allows(run, builder):
    on = stage(run, builder)
    on.engine.version = None
    node = Node(owner="a", role="inference", beat=1, host="h", pid=1)
    serve(run, a=[V1])
    on.recorder(START)

    def swap(call: Call) -> None:
        atomic.put(run.node("a"), msgspec.structs.replace(node, versions=[V2, V3]))

    on.engine.on_call = swap
    on.recorder(START)
    spans = [turn.spans for turn in on.recorder.close("")]
    assert [(s.oldest, s.newest) for (s,) in spans] == [(V1, V1), (V1, V3)]


@pytest.mark.parametrize("cell", ["absent", "names none"])
def test_tokens_of_an_engine_that_was_ending_are_sampled_again(run, builder, cell):
    on = stage(run, builder, wait_s=0.1)
    on.engine.version = None
    serve(run, a=[V1])
    if cell == "absent":
        run.node("a").unlink()
    else:
        atomic.put(run.node("a"), Node(owner="a", role="inference", beat=1, host="h", pid=1))
    with pytest.raises(EngineError, match="cannot tell the weights of a|no engine"):
        on.recorder(START)
    assert on.recorder.close("") == []


def test_a_conversation_sticks_to_its_engine_while_it_serves(run, builder):
    on = stage(run, builder)
    history = list(START)
    for count in range(4):
        if count == 3:
            serve(run, newest=V2, **{"b" if on.engine.calls[0].url == "http://a" else "a": [V2]})
        history += [answer(on.recorder(history)), tool("x")]
    urls = [call.url for call in on.engine.calls]
    assert urls[0] == urls[1] == urls[2] != urls[3]


def test_only_new_chains_take_the_salt_of_new_weights(run, builder):
    """Their caches are under its name. While an engine swaps, it may still compute with the older weights."""
    serve(run, a=[V1])
    on = stage(run, builder, part=3, wait_s=1.0)
    history = [*START, answer(on.recorder(START)), tool("x")]
    first = len(on.engine.calls)
    serve(run, updating=True, newest=V2, a=[V2, V1])
    on.recorder([Message(role="user", content="Another conversation.")])
    second = len(on.engine.calls)
    serve(run, newest=V2, a=[V2])
    on.recorder(history)
    third = len(on.engine.calls)
    on.recorder([Message(role="user", content="A third one.")])
    assert {call.salt for call in on.engine.calls[:first]} == {V1.name}
    assert {call.salt for call in on.engine.calls[first:second]} == {V1.name}
    assert {call.salt for call in on.engine.calls[second:third]} == {V1.name}, "its own prefix is cached"
    assert {call.salt for call in on.engine.calls[third:]} == {V2.name}


@pytest.mark.parametrize("versions", [[V1, V3], [V3, V1]])
def test_an_engine_that_is_updating_is_asked_and_may_be_at_either_version(run, builder, versions):
    serve(run, updating=True, newest=V3, a=versions)
    on = stage(run, builder, wait_s=1.0)
    on.engine.version = None
    on.recorder(START)
    ((span,),) = [turn.spans for turn in on.recorder.close("")]
    assert (span.oldest, span.newest, span.fewest_steps) == (V1, V3, 1)


def test_engines_that_lag_are_not_asked(run, builder):
    serve(run, newest=V3, a=[V1], b=[V2])
    on = stage(run, builder, wait_s=1.0)
    for _ in range(4):
        on.recorder(START)
    assert {call.url for call in on.engine.calls} == {"http://b"}


def test_the_least_loaded_engine_is_asked(run):
    pool = Endpoints(run, max_lag=0)
    with pool.take("", 1) as first, pool.take("", 1) as second, pool.take(first.owner, 1) as third:
        assert {first.owner, second.owner} == {"a", "b"}
        assert third.owner == first.owner
        with pool.take("", 1) as fourth:
            assert fourth.owner == second.owner


# Chains: messages are compared, not renderings.


def test_a_reply_that_turns_out_lost_is_extended_by_nothing(run, builder):
    on = stage(run, builder)
    exchange = on.recorder.ask(START)
    on.recorder.deliver(exchange)
    on.recorder.retract(exchange)
    on.recorder([*exchange.history, tool("x")])
    turns = on.recorder.close("")
    assert [(turn.parent, turn.delivered) for turn in turns] == [(None, False), (None, True)]


def test_a_changed_history_starts_a_chain(run, builder):
    on = stage(run, builder)
    history = talk(on.recorder, [tool("x")])
    compressed = [
        *START,
        Message(role="user", content="Summary: looked."),
        Message(role="assistant", content="Yes."),
    ]
    on.recorder([*compressed, Message(role="user", content="Go on.")])
    edited = [
        *history[:2],
        msgspec.structs.replace(history[2], content="I never said so"),
        *history[3:],
        tool("z"),
    ]
    on.recorder(edited)
    on.recorder([Message(role="user", content="A title, please.")])
    on.recorder([*history, tool("z")])
    on.recorder([*history, tool("z")], tools="[]")
    turns = on.recorder.close("")
    assert [turn.parent for turn in turns] == [None, 0, None, None, None, 1, None]
    assert [bool(turn.tools) for turn in turns] == [False] * 6 + [True]
    assert on.recorder.counts["chains"] == 5


def test_the_graded_conversation_is_no_side_call_of_program_or_policy(run, builder):
    on = stage(run, builder)
    assert on.recorder.main == -1
    on.recorder([Message(role="user", content="A title, please.")])
    assert on.recorder.main == 0
    talk(on.recorder, [tool("x")])  # which shows no tools either
    assert on.recorder.main == 0
    shown = [*START, Message(role="user", content="With tools.")]
    on.recorder(shown, tools="[]")
    of_the_policy = [Message(role="user", content="Hello?")]
    for _ in range(4):
        reply = on.recorder(of_the_policy, tools="[]")
        of_the_policy += [answer(reply), Message(role="user", content="More.")]
    assert on.recorder.main == 3


def test_what_clients_do_to_text_does_not_break_a_chain(run, tmp_path):
    on = stage(
        run,
        TokenBuilder(make_model(tmp_path / "model", THINKING)),
        replies=[f"<think>a</think>\n\n{REPLIES[0]}", "x"],
    )
    reply = on.recorder(START)
    call = ToolCall(name="view", arguments=json.dumps({"path": "m.py"}, separators=(",", ":")))
    assert "<think>" in reply.content
    on.recorder([*START, Message(role="assistant", content="Look. ", tool_calls=[call]), tool("x")])
    assert [turn.parent for turn in on.recorder.close("")] == [None, 0]


# Which history a policy sees.


def test_a_history_rendered_afresh_is_what_a_served_model_would_see(run, tmp_path):
    thinking = TokenBuilder(make_model(tmp_path / "model", THINKING))
    replies = [f"<think>\nhm {number}\n</think>\n\n{text}" for number, text in enumerate(REPLIES)]
    on = stage(run, thinking, replies=replies, history="template")
    history = talk(on.recorder, [tool("1: x")], [Message(role="user", content="Sure?")], [tool("<|im_end|>")])
    turns = on.recorder.close("")
    assert [(turn.parent, turn.delivered) for turn in turns] == [(None, True)] * 4
    assert [sequence(turns, n) for n in range(4)] == [c.prompt + c.answer.token_ids for c in on.engine.calls]
    *_, third, last = (thinking.tokens.decode(id_array(turn.appended_ids)) for turn in turns)
    assert "hm 0" not in third + last, "the template drops thoughts before the last question"
    assert "hm 2" in last
    assert last.count("<think>") == 1
    assert id_array(turns[2].appended_ids).tolist() == thinking.tokens.encode_whole(third)
    kept = stage(run, thinking, replies=replies)
    assert kept.recorder(history[:2]).content == history[2].content
    assert kept.recorder([*history[:3], tool("x")])
    assert "hm 0" in thinking.tokens.decode(sequence(kept.recorder.close(""), 1))


# Limits.


def test_a_full_context_is_no_failure(run, builder):
    on = stage(run, builder, context=150)
    history = [*START, answer(on.recorder(START)), tool("x = 1\n" * 60)]
    with pytest.raises(ContextFull, match="context length 150; an answer needs 16"):
        on.recorder(history)
    assert on.recorder.failure is None
    assert on.recorder.counts["context_full"] == 1


def test_a_program_that_ends_with_half_a_reply_has_a_full_context(run, builder):
    on = stage(run, builder)
    first = on.recorder(START)
    on.recorder([*START, answer(first), tool("x")])
    assert on.recorder.refusal is None
    spent = sum(len(turn.appended_ids + turn.completion_ids) // 4 for turn in on.recorder.close(""))
    on = stage(run, builder, context=spent - 1)
    on.recorder([*START, answer(on.recorder(START)), tool("x")])
    assert on.recorder.refusal is not None
    assert on.recorder.refusal.status == ExitStatus.CONTEXT


@pytest.mark.slow
def test_the_backstop_excludes_the_engine(run, builder):
    on = stage(run, builder, episode_timeout_s=3.0)
    on.engine.on_call = lambda call: time.sleep(2.0)
    history = [*START, answer(on.recorder(START)), tool("x")]
    on.recorder(history)
    time.sleep(3.1)
    with pytest.raises(SandboxError, match="episode_timeout_s"):
        on.recorder(history)
    assert isinstance(on.recorder.failure, SandboxError)
