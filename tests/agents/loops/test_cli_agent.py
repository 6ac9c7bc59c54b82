"""How an agent that is a program ended: what is its doing, what its budget's, and what the host's."""

import sys
import time
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.loops.base import Refusal
from hpc_swe.agents.loops.cli_agent import CliAgent, outcome
from hpc_swe.agents.sandboxes.base import CommandResult
from hpc_swe.base.errors import ConfigError, EngineError
from hpc_swe.base.records import Episode, ExitStatus, id_array
from tests.kit.constants import varied
from tests.kit.scripted import SMALL
from tests.kit.sessions_kit import KITS, call
from tests.kit.stage import Rig, rig
from tests.kit.toy_engine import ToyEngine

# Does what its words say: "ask" goes on, "full" asks for too much, "bad" nonsense, "side" and "sub" apart.
CLIENT = """
import json, os, sys, time, urllib.error, urllib.request
history = [{"role": "user", "content": open(sys.argv[1]).read()}]
def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        print("[API Error:", error.code)
for word in sys.argv[2:]:
    if word == "ask":
        said = ask(history)
        history += [said, {"role": "user", "content": "Go on."}] if said else []
    elif word == "full":
        ask(history + [{"role": "user", "content": "x " * 9000}])
    elif word == "bad":
        ask("nonsense")
    elif word == "side":
        ask([{"role": "user", "content": "A title, please."}])
    elif word == "sub":
        task = [{"role": "user", "content": "Look around."}]
        ask(task + [ask(task), {"role": "user", "content": "Go on."}])
    elif word == "compress":
        history = [{"role": "user", "content": "Summary: nothing was found."}]
    elif word == "drop":
        history[1:] = [{"role": "user", "content": "What was said is gone. Go on."}]
    elif word == "hang":
        time.sleep(600)
    elif word == "mend":
        open("m.py", "w").write("def f(x, y): return x + y")
    elif word == "flood":
        print("x" * 100_000)
    elif word.isdigit():
        sys.exit(int(word))
"""


@pytest.fixture
def home(tmp_path: Path) -> str:
    return str(tmp_path / "home")


def play(tmp_path: Path, words: str, **fields: object) -> tuple[Episode, Rig]:
    fields = {"command": f"python3 {{home}}/client.py {{prompt_file}} {words}", "max_turns": 5} | fields
    table = {"files": {"client.py": CLIENT}, "exit_codes": {"53": "max_turns"}}
    agent = msgspec.convert(table | fields, varied(CliAgent, home=str(tmp_path / "home"), most_chars=500))
    wait_s = 1.0 if "break" in words else 60.0
    made = rig(
        tmp_path / "run", tmp_path / "model", agent, replies=["a", "b", "c"], wait_s=wait_s, context=2000
    )
    if words.startswith("ask break"):
        made.engine.on_call = lambda call: break_after(made.engine, 2)
    made.ask()
    made.drain()
    return made.episodes["train-000000-00"], made


def break_after(engine: ToyEngine, calls: int) -> None:
    if len(engine.calls) >= calls:
        raise EngineError("the engine is gone")


ENDINGS = {
    "ask ask 0": (ExitStatus.SUBMITTED, 2),
    "ask 1": (ExitStatus.AGENT_ERROR, 1),
    "ask 53": (ExitStatus.MAX_TURNS, 1),
    "ask ask ask ask ask ask 0": (ExitStatus.MAX_TURNS, 5),
    "ask full 0": (ExitStatus.CONTEXT, 1),
    "full 0": (ExitStatus.CONTEXT, 0),
    "ask full side 0": (ExitStatus.CONTEXT, 2),
    "ask full compress ask ask 0": (ExitStatus.SUBMITTED, 3),
    "bad 0": (ExitStatus.AGENT_ERROR, 0),
    "ask ask bad 0": (ExitStatus.SUBMITTED, 2),
    "ask bad 1": (ExitStatus.AGENT_ERROR, 1),
    "ask ask ask ask ask side 0": (ExitStatus.SUBMITTED, 5),
    "ask ask ask ask ask ask side 0": (ExitStatus.MAX_TURNS, 5),
    "ask ask ask ask ask drop ask 0": (ExitStatus.MAX_TURNS, 5),
    "ask ask drop full 0": (ExitStatus.CONTEXT, 2),
    "ask ask sub drop full 0": (ExitStatus.CONTEXT, 4),
    "ask bad ask 0": (ExitStatus.SUBMITTED, 2),
    "ask hang": (ExitStatus.TOOL_TIME, 1),
    "0": (ExitStatus.INFRA_ERROR, 0),
    "127": (ExitStatus.INFRA_ERROR, 0),
    "hang": (ExitStatus.INFRA_ERROR, 0),
    "ask break ask 0": (ExitStatus.INFRA_ERROR, 1),
    "ask break ask hang": (ExitStatus.INFRA_ERROR, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", ENDINGS)
def test_how_a_program_ended(tmp_path: Path, words: str) -> None:
    """The first requests of a program that never asks are nobody's doing; of one that hangs, its own."""
    made, _ = play(tmp_path, words, timeout_s=20.0 if "hang" in words else 300.0)
    status, turns = ENDINGS[words]
    assert (made.exit_status, len(made.turns)) == (status, turns), made.error
    if status == ExitStatus.SUBMITTED:
        assert made.error == ""
    elif status != ExitStatus.MAX_TURNS or turns == 1:
        assert made.error != ""


def test_a_misunderstood_side_call_keeps_the_work_of_a_hung_program() -> None:
    refusal = Refusal(ExitStatus.AGENT_ERROR, "no such role", is_side_request=True)
    hung = CommandResult(137, "", timed_out=True)
    assert outcome(CliAgent(command="true"), hung, refusal)[0] == ExitStatus.TOOL_TIME
    main = Refusal(ExitStatus.AGENT_ERROR, "no such role")
    assert outcome(CliAgent(command="true"), hung, main) == (ExitStatus.AGENT_ERROR, "no such role")


@pytest.mark.slow
def test_time_at_the_engines_is_not_the_programs(tmp_path: Path) -> None:
    agent_s = 10.0
    agent = msgspec.convert(
        {
            "command": "python3 {home}/client.py {prompt_file} ask ask 0",
            "files": {"client.py": CLIENT},
            "timeout_s": agent_s,
        },
        varied(CliAgent, home=str(tmp_path / "home")),
    )
    made = rig(tmp_path / "run", tmp_path / "model", agent, replies=["a", "b"], context=2000)
    made.engine.on_call = lambda call: time.sleep(5.5)
    made.ask()
    made.drain()
    (found,) = made.episodes.values()
    assert found.exit_status == ExitStatus.SUBMITTED
    assert found.timing.engine_s > agent_s > found.timing.tools_s


def test_compression_and_side_calls_are_chains_of_their_own(tmp_path: Path) -> None:
    made, _ = play(tmp_path, "ask side ask compress ask 0")
    assert [turn.parent for turn in made.turns] == [None, None, 0, None]
    assert made.counts["chains"] == 3


def test_its_work_is_handed_in_and_its_output_kept_short(tmp_path: Path) -> None:
    made, _ = play(tmp_path, "ask mend flood 0")
    assert "+def f(x, y): return x + y" in made.submission
    assert "client.py" not in made.submission
    assert made.messages[-1].role == "tool"
    assert len(made.messages[-1].content) < 700
    assert [message.content for message in made.messages[:2]] == [SMALL.prompt, "a"]


def test_the_prompt_is_a_file_and_may_hold_anything(tmp_path: Path) -> None:
    prompt = "{task} in {workdir}: {key} $(touch m.py) '\"\\ <|im_end|> {0}"
    made, rig = play(tmp_path, "ask 0", prompt=prompt)
    asked = made.messages[0].content
    assert asked == "Mend it. in /testbed: {key} $(touch m.py) '\"\\ <|im_end|> {0}"
    control = set(rig.means.builder.tokens.control.values())
    plain, _ = play(tmp_path / "plain", "ask 0", prompt="x")
    prompts = [id_array(episode.turns[0].appended_ids).tolist() for episode in (made, plain)]
    counts = [sum(token in control for token in prompt) for prompt in prompts]
    assert counts[0] == counts[1]


def test_a_folder_where_the_patch_should_be_is_no_error_of_mini_swe_agent(tmp_path: Path) -> None:
    kit = KITS / "mini-swe-agent"
    if not (kit / "stamp").exists():
        pytest.skip("mini_swe_agent is not installed: containers/build_agents.sh says why not")
    words = ("mkdir patch.txt; touch done.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    kind = varied(CliAgent, home=str(tmp_path / "home"))
    agent = kind(command=f"{sys.executable} -I {kit}/mini.py {{prompt_file}}")
    replies = [call("bash", command=word) for word in words]
    made = rig(tmp_path / "run", tmp_path / "model", agent, replies=replies, context=32_000)
    made.ask()
    made.drain()
    (played,) = made.episodes.values()
    assert (played.exit_status, len(played.turns)) == (ExitStatus.SUBMITTED, 2), played.error
    assert "done.py" in played.submission


def test_a_program_cannot_excuse_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="infra_error"):
        CliAgent(command="true", exit_codes={"7": ExitStatus.INFRA_ERROR})
