"""What is recorded is what was sampled: random conversations on every form of template."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_swe.agents.loops.base import Reply
from hpc_swe.base.records import Message, Turn, float_array, id_array
from hpc_swe.roles.coordinator.batching.samples import find_flaw, make_samples
from tests.kit.forms import FORMS, NAMES, call, thought
from tests.kit.made_episodes import episode
from tests.kit.recording import Stage

START = [Message(role="system", content="Repair."), Message(role="user", content="It fails.")]
SPELLED = st.lists(st.one_of(st.sampled_from(NAMES), st.text(max_size=5)), max_size=4).map("".join)
# Ids that only a policy would choose: control tokens anywhere, bytes that are no text, numbers above the
# vocabulary, whose embeddings are there because tables are padded.
WILD = st.lists(st.integers(0, 400), max_size=12)


@st.composite
def replies(draw: st.DrawFn) -> dict[str, object]:
    """Parallel calls, none, or nothing at all; whole or cut off."""
    return {
        "text": draw(SPELLED),
        "calls": draw(st.lists(SPELLED.filter(lambda text: "\n" not in text), max_size=3)),
        "wild": draw(WILD),
        "is_empty": draw(st.booleans()) and draw(st.booleans()),
        "is_cut": draw(st.booleans()) and draw(st.booleans()),
        "is_lost": draw(st.booleans()) and draw(st.booleans()),
        "answers": draw(st.lists(SPELLED, min_size=4, max_size=4)),
    }


def sampled(on: Stage, kind: str, reply: dict) -> list[int]:
    """The ids of a reply."""
    tokens, end = on.builder.tokens, on.builder.end_id
    if reply["is_empty"]:
        return [] if reply["is_cut"] else [end]
    calls = [part for path in reply["calls"] for part in call(kind, "view", path=path)]
    ids = tokens.encode_parts([*thought(kind, reply["text"]), (reply["text"], False), *calls])
    # An engine stops at the end of a turn; so it is never inside of one.
    return [token for token in [*ids, *reply["wild"]] if token != end] + ([] if reply["is_cut"] else [end])


def converse(on: Stage, script: Sequence[dict]) -> list[Turn]:
    """An agent that answers each call, or asks for one; a reply that is lost it asks for again."""
    history = list(START)
    for reply in script:
        if reply["is_lost"]:
            on.recorder.ask(history)
        said: Reply = on.recorder(history)
        history.append(Message(role="assistant", content=said.content, tool_calls=said.tool_calls))
        answers = iter(reply["answers"] * len(said.tool_calls or [0]))
        history += [Message(role="tool", content=next(answers)) for _ in said.tool_calls] or [
            Message(role="user", content=next(answers))
        ]
    return on.recorder.close("over")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS)
@settings(max_examples=150)
@given(script=st.lists(replies(), min_size=1, max_size=5))
def test_prompts_extend_and_every_sampled_token_is_trained_once(stage, kind, script):
    spoken = [reply for reply in script for _ in range(1 + reply["is_lost"])]
    on: Stage = stage(kind, [])
    on.engine.answers += [sampled(on, kind, reply) for reply in spoken]
    turns = converse(on, script)
    made = episode(turns)
    assert find_flaw(made) == ""
    whole: dict[int | None, list[int]] = {None: []}
    for at, (turn, asked, answer) in enumerate(zip(turns, on.engine.calls, on.engine.answers, strict=True)):
        assert asked.prompt == whole[turn.parent] + id_array(turn.appended_ids).tolist()
        assert turn.completion.tolist() == answer
        whole[at] = asked.prompt + answer
    (sample,) = make_samples(made, 1.0, "all", 0).samples
    delivered = [turn for turn in turns if turn.delivered]
    assert len(delivered) == len(script)
    assert id_array(sample.token_ids).tolist() == whole[len(turns) - 1]
    mask = sample.mask_array.astype(bool)
    assert mask.sum() == sum(len(turn.completion) for turn in delivered)
    expected = [token for turn in delivered for token in turn.completion.tolist()]
    assert id_array(sample.token_ids)[mask].tolist() == expected
    logprobs = np.concatenate([float_array(turn.logprobs) for turn in delivered])
    np.testing.assert_array_equal(float_array(sample.logprobs)[mask], logprobs)
    # What is between answers is the template's: one end of turn more after an answer that was cut.
    for turn in (turn for turn in turns if turn.parent is not None):
        parent = turns[turn.parent].completion
        is_open = not len(parent) or parent[-1] != on.builder.end_id
        assert on.control(id_array(turn.appended_ids)).count(on.builder.end_id) == 1 + is_open


# What a policy may sample in the middle of its turn, and what is made of it: it is kept as sampled, and read
# as the text that the token spells.
SAMPLED = {
    "a new turn": ("Hm.<|im_start|>user\nSubmit.", [], "Hm.<|im_start|>user\nSubmit."),
    "a turn and then a call": ("<|im_start|>assistant\nCALL", ["view"], "<|im_start|>assistant"),
    "the other end of text": ("Done.<|endoftext|>", [], "Done.<|endoftext|>"),
    "after a call": ("CALL<|endoftext|><|fim_prefix|>", ["view"], ""),
    "a mark in a mark": ("<tool_call><tool_call>CALL", [], None),
    "a mark alone": ("<tool_call>", [], None),
    "an end alone": ("</tool_call></think></tool_response>", [], "</tool_call></think></tool_response>"),
    "a thought that never ends": ("<think>CALL", [], None),
    "an answer of a tool": ("<tool_response>\nok\n</tool_response>CALL", ["view"], None),
}


@pytest.mark.parametrize("case", SAMPLED)
@pytest.mark.parametrize("kind", ["qwen2.5", "qwen3 not thinking", "qwen3-coder"])
def test_control_tokens_in_the_middle_of_an_answer_stay_where_they_are(stage, kind, case):
    text, names, content = SAMPLED[case]
    said = "".join(part for part, _ in call(kind, "view", path="m.py"))
    on: Stage = stage(kind, [[(text.replace("CALL", said), True)], [("Done.", False)]])
    reply = on.recorder(START)
    assert [found.name for found in reply.tool_calls] == names
    if names:
        assert json.loads(reply.tool_calls[0].arguments) == {"path": "m.py"}
    if content is not None:
        assert reply.content == content
    told = Message(role="assistant", content=reply.content, tool_calls=reply.tool_calls)
    on.recorder([*START, told, Message(role="tool", content="ok")])
    first, second = on.recorder.close("over")
    assert (second.parent, len(first.completion)) == (0, len(on.engine.answers[0]))
    assert on.engine.calls[1].prompt == [
        *on.engine.calls[0].prompt,
        *on.engine.answers[0],
        *id_array(second.appended_ids),
    ]
    plain: Stage = stage(kind, [[("Hm.", False)], [("Done.", False)]])
    answer = Message(role="assistant", content=plain.recorder(START).content)
    plain.recorder([*START, answer, Message(role="tool", content="ok")])
    assert second.appended_ids == plain.recorder.close("over")[1].appended_ids
