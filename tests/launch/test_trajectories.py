"""Conversations of others become the tokens that an episode would have, or a start refuses them."""

import datetime
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Message, ToolCall, id_array
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.parquet import trajectories as stored
from hpc_swe.config import config as configuration
from hpc_swe.config.tokenization import token_builder
from hpc_swe.launch import checks, control, create, existing, plan, trajectories
from hpc_swe.makers.export_episodes import chat_form
from tests.kit.checkout import ROOT
from tests.kit.conversations import (
    ONE_CALL,
    ONE_CALL_PIECES,
    THOUGHTS,
    THOUGHTS_PIECES,
    TWO_CALLS,
    TWO_CALLS_PIECES,
    VIEW,
    calls,
    said,
    tokens,
    write,
)
from tests.kit.recording import V1, serve, stage
from tests.kit.toy_model import HERMES, THINKING, make_model


@pytest.fixture
def read(tmp_path):
    """Configurations of SFT on some rows."""
    make_model(tmp_path / "hermes", HERMES)
    make_model(tmp_path / "thinking", THINKING)

    def config(*words, rows=(ONE_CALL,), model="hermes"):
        file = write(tmp_path / "rows.jsonl", rows)
        fixed = [f"model={tmp_path / model}", "rollout.context=4000"]
        fixed += ["batches.microbatch_tokens=4000", f'sft={{trajectories=["{file}"]}}']
        files = [ROOT / "configs/demo.toml", ROOT / "configs/demo_sft.toml"]
        return configuration.read(*files, overrides=[*fixed, *words])

    return config


def taken(config: configuration.RunConfig) -> list[tuple[list[int], list[int]]]:
    """Ids and masks of what is used."""
    return [
        (id_array(each.token_ids).tolist(), list(each.mask))
        for each in trajectories.take(config)
        if each.is_used
    ]


@pytest.mark.parametrize(
    ("row", "pieces", "model"),
    [
        (ONE_CALL, ONE_CALL_PIECES, "hermes"),
        (TWO_CALLS, TWO_CALLS_PIECES, "hermes"),
        (THOUGHTS, THOUGHTS_PIECES, "thinking"),
    ],
    ids=["one call a turn", "two calls", "thoughts"],
)
def test_each_token_of_a_row_has_the_id_and_the_mask_written_by_hand(read, tmp_path, row, pieces, model):
    assert taken(read(rows=[row], model=model)) == [tokens(tmp_path / model, pieces)]


def test_a_row_trains_the_tokens_that_the_recorder_records(read, run):
    words = ["sft.shown=agent", "agent.show_tools=true", "agent.system_prompt=Repair it."]
    config, view = read(*words), ToolCall(name="view", arguments='{"path": "m.py"}')
    replies = ['I look.\n<tool_call>\n{"name": "view", "arguments": {"path": "m.py"}}\n</tool_call>', "Done."]
    messages = [
        Message(role="system", content="Repair it."),
        Message(role="user", content="m.py fails."),
        Message(role="assistant", content="I look.", tool_calls=[view]),
        Message(role="tool", content="<|im_end|> x = 1"),
        Message(role="assistant", content="Done."),
    ]
    serve(run, e1=[V1])
    builder = token_builder(config)
    answers = [builder.tokens.encode_whole(reply) + [builder.end_id] for reply in replies]
    recorder = stage(run, builder, answers=answers, context=4000).recorder
    for end in (2, 4):
        recorder(messages[:end], config.agent.preface.tools)
    parts = [
        (part, mask)
        for turn in recorder.close("over")
        for part, mask in ((turn.appended_ids, 0), (turn.completion_ids, 1))
    ]
    ids = [token for part, _ in parts for token in id_array(part).tolist()]
    mask = [mask for part, mask in parts for _ in id_array(part)]
    other = Message(role="system", content="Somebody else's prompt.")
    row = {"messages": chat_form([other, *messages[1:]])}
    assert taken(read(*words, rows=[row])) == [(ids, mask)]


def test_thoughts_are_dropped_when_so_configured(read, tmp_path):
    plain = [
        (re.sub(r"<think>.*?</think>\n\n", "", text, flags=re.DOTALL), mask) for text, mask in THOUGHTS_PIECES
    ]
    assert taken(read("sft.thoughts=drop", rows=[THOUGHTS], model="thinking")) == [
        tokens(tmp_path / "thinking", plain)
    ]


def test_a_parquet_row_loses_the_nulls_that_its_columns_pad_it_with(read, tmp_path):
    other = {
        "type": "function",
        "function": {
            "name": "b",
            "description": "B",
            "parameters": {"properties": {"n": {"type": "integer"}}},
        },
    }
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([ONE_CALL | {"tools": [VIEW, other]}, ONE_CALL]), path)
    found = taken(read(f'sft.trajectories=["{path}"]'))
    assert found[1] == tokens(tmp_path / "hermes", ONE_CALL_PIECES)
    assert "null" not in token_builder(read()).tokens.decode(found[0][0])


def as_objects(row):
    """The row with arguments that are objects, as many data sets have them."""
    row = json.loads(json.dumps(row))
    for message in row["messages"]:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return row


def test_calls_of_a_parquet_row_have_no_argument_of_another_tool(read, tmp_path):
    """The column of arguments has the keys of all tools, and an agent would learn to write them as null."""
    nested = ("b", {"span": {"to": 2}, "spans": [{"since": 1}, {"to": 3}]})
    others = with_messages(
        ASK, said("assistant", "", tool_calls=calls(nested, ("c", {"n": 0, "quiet": False})))
    )
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([as_objects(ONE_CALL), as_objects(others)]), path)
    found = taken(read(f'sft.trajectories=["{path}"]'))
    assert found == [tokens(tmp_path / "hermes", ONE_CALL_PIECES), *taken(read(rows=[others]))]


def test_a_null_that_a_line_of_json_has_itself_is_trained(read):
    null = with_messages(ASK, said("assistant", "", tool_calls=calls(("a", {"n": None}))))
    ((ids, _),) = taken(read(rows=[as_objects(null)]))
    assert '"arguments": {"n": null}' in token_builder(read()).tokens.decode(ids)


def test_arguments_that_json_cannot_hold_are_refused_with_their_place(read, tmp_path):
    dated = [{"function": {"name": "a", "arguments": {"since": datetime.date(2024, 1, 1)}}}]
    path = tmp_path / "rows.parquet"
    row = with_messages(ASK, said("assistant", "", tool_calls=dated))
    pq.write_table(pa.Table.from_pylist([row]), path)
    with pytest.raises(ConfigError, match=r"row 1: messages\[1\].tool_calls\[0\].*is no JSON object"):
        trajectories.take(read(f'sft.trajectories=["{path}"]'))


def test_the_agent_s_prompt_and_tools_replace_those_of_the_rows(read):
    config = read("sft.shown=agent", "agent.show_tools=true", "agent.system_prompt=Mend.")
    text = token_builder(config).tokens.decode(taken(config)[0][0])
    assert text.startswith("<|im_start|>system\nMend.\n\nTools, one ")
    assert "Repair it." not in text
    assert '"name": "rewrite"' in text
    with pytest.raises(
        ConfigError, match=r"rows.jsonl: row 1: messages\[2\].tool_calls: no tool 'view' in \[agent\]"
    ):
        trajectories.take(read("sft.shown=agent", 'agent.tools=["replace", "submit"]'))


def test_a_long_conversation_is_cut_after_a_turn_or_left_out(read):
    whole = taken(read())[0]
    ends = [i + 1 for i in range(len(whole[1])) if whole[1][i] and not (whole[1] + [0])[i + 1]]
    limit = [f"rollout.context={ends[0] + 3}"]
    assert taken(read(*limit)) == [(whole[0][: ends[0]], whole[1][: ends[0]])]
    assert [t.fate for t in trajectories.take(read(*limit, rows=[ONE_CALL, TWO_CALLS]))] == ["cut", "whole"]
    with pytest.raises(ConfigError, match=r"sft.trajectories: no conversation is left"):
        trajectories.take(read("rollout.context=20"))


def changed(**more):
    return ONE_CALL | more


def with_messages(*messages):
    return {"messages": list(messages)}


ASK, ANSWER = said("user", "?"), said("assistant", "!")
BAD = {
    r"row 1: not a row in chat form: .*; docs/sft.md": "{",
    r"row 2: not a row .* required field `messages`": {"conversation": []},
    r"Expected `str \| null`, got `int` - at `\$.messages\[1\].content`": with_messages(
        ASK, said("assistant", 3)
    ),
    r"Invalid enum value 'human' - at `\$.messages\[0\].role`": with_messages(said("human", "?"), ANSWER),
    r"messages: no assistant message, so .* leave the row out": with_messages(ASK),
    r"messages\[0\].role: an answer to no message": with_messages(ANSWER),
    r"messages\[2\].role: an answer to no message": with_messages(ASK, ANSWER, ANSWER),
    r"messages\[1\].role: only the first": with_messages(ASK, said("system", "s"), ANSWER),
    r"messages\[1\].role: a tool's answer to no call": with_messages(ASK, said("tool", "t"), ANSWER),
    r"messages\[0\].tool_calls: only an assistant": with_messages(
        ASK | {"tool_calls": calls(("a", {}))}, ANSWER
    ),
    r"messages\[2\].tool_call_id: 'x' is the id of no call": with_messages(
        ASK, said("assistant", "", tool_calls=calls(("a", {}))), said("tool", "t", tool_call_id="x"), ANSWER
    ),
    r"messages\[1\].tool_calls\[0\].function.arguments: '\[1\]' is no JSON object": with_messages(
        ASK, said("assistant", "", tool_calls=[{"function": {"name": "a", "arguments": "[1]"}}])
    ),
    r"messages\[1\].function_call: an old form; write tool_calls": with_messages(
        ASK, ANSWER | {"function_call": {"name": "a", "arguments": "{}"}}
    ),
    r"tools: not a JSON list of schemas": changed(tools="view"),
    r"enable_thinking: False, but episodes of this run have None; set it to false in roll": changed(
        enable_thinking=False
    ),
    r"token_ids without loss_mask; export it again": changed(token_ids=[1, 2]),
    r"token_ids and loss_mask: 2 ids, 1 marks": changed(token_ids=[1, 2], loss_mask=[1], tokenizer="t"),
    r"token_ids: of another tokenizer than model = ": changed(
        token_ids=[1, 2], loss_mask=[0, 1], tokenizer="t"
    ),
}


@pytest.mark.parametrize(("message", "row"), BAD.items(), ids=list(BAD))
def test_a_bad_row_stops_the_start_with_its_place_and_a_remedy(read, tmp_path, message, row):
    config = read(rows=[TWO_CALLS, row])
    if row == "{":
        (tmp_path / "rows.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match=message) as raised:
        trajectories.take(config)
    first, *_, last = str(raised.value).splitlines()
    assert first.startswith(f"{tmp_path}/rows.jsonl: row ")
    assert last.startswith("1 of ")
    assert 'set sft.bad_rows = "drop"' in last
    if row != "{":
        found = trajectories.take(read("sft.bad_rows=drop", rows=[TWO_CALLS, row]))
        assert [(each.fate, bool(each.why)) for each in found] == [("whole", False), ("dropped", True)]


def test_a_thought_where_the_prompt_ends_an_empty_one_is_refused(read):
    closed = ["rollout.template_arguments.enable_thinking=false"]
    with pytest.raises(
        ConfigError, match=r"messages\[1\]: an answer with a thought, .* a thought closed; change"
    ):
        trajectories.take(read(*closed, rows=[THOUGHTS], model="thinking"))
    assert len(taken(read(*closed, "sft.thoughts=drop", rows=[THOUGHTS], model="thinking"))) == 1


def test_a_share_of_the_tasks_is_held_out_and_never_trained(read):
    rows = [_about(f"task {n % 10}", f"question {n}") for n in range(40)]
    config = read("sft.validation_share=0.2", "eval.every=1", rows=rows)
    found = trajectories.take(config)
    tasks = {split: {t.task_id for t in found if t.split == split} for split in ("train", "eval")}
    assert (len(tasks["train"]), len(tasks["eval"])) == (8, 2)
    assert not tasks["train"] & tasks["eval"]
    assert found == trajectories.take(config)
    other = trajectories.take(read("seed=9", "sft.validation_share=0.2", "eval.every=1", rows=rows))
    assert [t.split for t in other] != [t.split for t in found]


def _about(task, text):
    return with_messages(said("user", text), ANSWER) | {"task_id": task}


def test_a_conversation_that_is_trained_may_not_be_validated_with(read, tmp_path):
    held_out = write(tmp_path / "held.jsonl", [TWO_CALLS, ONE_CALL])
    words = [f'sft.validation=["{held_out}"]', "eval.every=2"]
    with pytest.raises(
        ConfigError, match=r"held.jsonl: row 2: sft.validation: the same conversation as .*rows.jsonl: row 1"
    ):
        trajectories.take(read(*words))
    write(held_out, [TWO_CALLS])
    assert [t.split for t in trajectories.take(read(*words))] == ["train", "eval"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft.trajectories=[]", "sft.epochs=1"], "epochs and validation need"),
        (["sft.validation_share=0.5", "eval.every=0"], "eval.every = 0: sft.validation and"),
        (["sft.validation_share=0.5", 'sft.validation=["x"]'], "validation names files"),
        (['rollout.history="template"'], "trajectories are trained as episodes"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(read, words, message):
    with pytest.raises(ConfigError, match=message):
        read(*words)


def test_epochs_become_steps(read, tmp_path):
    rows = [_about("", f"question {n}") for n in range(7)]
    config = read("sft.epochs=3", "sft.samples_per_step=4", rows=rows)
    found = trajectories.resolved(RunDir(tmp_path), config, trajectories.take(config))
    assert found.steps == 6
    again = configuration.build(configuration.dump(found), "run.json")
    assert again == found


def test_a_run_keeps_its_tokens_when_the_files_change(read, tmp_path, run):
    config = read(rows=[ONE_CALL, TWO_CALLS])
    place = RunDir(tmp_path / "made")
    place.make()
    create.publish(place, place, config, plan.take(config), "")
    (tmp_path / "rows.jsonl").unlink()
    kept = stored.read(place.trajectories)
    assert [t.name.rpartition("/")[2] for t in kept] == ["rows.jsonl: row 1", "rows.jsonl: row 2"]
    assert id_array(kept[0].token_ids).tolist() == tokens(tmp_path / "hermes", ONE_CALL_PIECES)[0]
    assert list(kept[0].mask) == tokens(tmp_path / "hermes", ONE_CALL_PIECES)[1]


def test_a_second_start_finds_the_steps_of_its_epochs_without_the_files(read, tmp_path):
    (tmp_path / "hermes/config.json").write_text('{"eos_token_id": 322}')
    rows = [_about("", f"question {n}") for n in range(3)]
    words = ["sft.epochs=2", "sft.samples_per_step=4", "counts={coordinator=0, learner=0}"]
    run, config = RunDir(tmp_path / "twice"), read(*words, rows=rows)
    control.start(run, config)
    (tmp_path / "rows.jsonl").unlink()
    control.start(run, config)
    assert existing.load(run).steps == 2
    with pytest.raises(ConfigError, match="sft.epochs: 2 -> 3"):
        control.start(run, read(*words, "sft.epochs=3", rows=rows))


def test_complaints_about_rows_stand_beside_all_others(read, tmp_path):
    config = read(rows=["?"])
    with pytest.raises(ConfigError) as raised:
        checks.require(plan.plan_start(RunDir(tmp_path / "run"), config))
    lines = str(raised.value).splitlines()
    assert any("rows.jsonl: row 1" in line for line in lines)
    assert any("no config.json there" in line for line in lines)
    assert not (tmp_path / "run").exists()
