"""The tool agent's endings, and submissions as exact differences."""

import json
import re
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_swe.agents.loops.base import ContextFull, Reply, Result
from hpc_swe.agents.loops.tool_agent import ToolAgent
from hpc_swe.agents.sandboxes.base import CommandResult
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import EngineError, SandboxError
from hpc_swe.base.records import ToolCall
from hpc_swe.tasks import patch
from hpc_swe.tasks.patch import BadPatch, apply, difference, take
from tests.kit.constants import varied
from tests.kit.scripted import SMALL, Script, call

TASK = msgspec.structs.replace(SMALL, files={"mod.py": "x = 1\n", "gone.py": "y\n"})


def solve(
    script: Callable[..., Reply], kind: type[ToolAgent] = ToolAgent, **fields: object
) -> tuple[Result, str]:
    with Process().open(TASK) as sandbox:
        result = kind(**fields).solve(TASK, sandbox, script)
        return result, take(TASK, sandbox, Process())


def test_it_acts_until_it_submits():
    edit = call("replace", path="mod.py", line=1, old="1", new="2")
    result, text = solve(Script(call("view", path="mod.py"), edit, call("submit")))
    assert result.exit_status == "submitted"
    assert [(m.role, m.content) for m in result.messages] == [
        ("system", "Fix the bug."),
        ("user", "Mend it."),
        ("assistant", ""),
        ("tool", "1:x = 1"),
        ("assistant", ""),
        ("tool", "ok"),
        ("assistant", ""),
        ("tool", "ok"),
    ]
    assert apply(TASK, text) == TASK.files | {"mod.py": "x = 2\n"}


def test_a_reply_without_a_call_is_asked_for_one_and_costs_a_turn():
    result, _ = solve(Script(Reply("I think"), Reply("so"), Reply("")), max_turns=3)
    assert result.exit_status == "max_turns"
    assert [m.content for m in result.messages[2:]] == [
        "I think",
        "Call a tool.",
        "so",
        "Call a tool.",
        "",
        "Call a tool.",
    ]


def test_all_calls_of_a_reply_are_answered_and_none_after_submit():
    calls = [
        ToolCall(name=name, arguments=text)
        for name, text in [("view", "{"), ("fly", "{}"), ("submit", ""), ("view", "")]
    ]
    result, _ = solve(Script(Reply("", calls)))
    answers = [m.content for m in result.messages if m.role == "tool"]
    assert result.exit_status == "submitted"
    assert [a.partition(":")[0] for a in answers] == ["Wrong arguments", "No tool 'fly'; tools", "ok"]


def test_a_full_context_and_spent_seconds_end_it():
    assert solve(Script(call("submit")), tool_budget_s=0.0)[0].exit_status == "submitted"
    assert solve(Script(call("view", path="mod.py")), tool_budget_s=0.0)[0].exit_status == "tool_time"
    assert solve(Script(ContextFull()))[0].exit_status == "context"


@pytest.mark.parametrize(
    "asked",
    [
        call("bash", command="sleep 100", timeout_s=100),
        call("grep", pattern="(a+)+$", path="slow"),
        call("evaluate"),
    ],
    ids=["bash", "grep", "evaluate"],
)
def test_a_call_ends_with_the_seconds_of_all_calls(asked: Reply):
    """One that outlasted them could outlast the episode too, and what idles would be the host's failure."""
    files = {"slow": "a" * 40 + "!", "test_slow.py": "while True: pass\n"}
    task = msgspec.structs.replace(TASK, files=files)
    agent = ToolAgent(
        tools=("bash", {"type": "grep", "timeout_s": 100.0}, {"type": "evaluate", "timeout_s": 100.0}),
        tool_budget_s=1.0,
    )
    with Process().open(task) as sandbox:
        result = agent.solve(task, sandbox, Script(asked))
    assert result.exit_status == "tool_time"
    told = re.search(r"(?:after|longer than) ([\d.]+) s", result.messages[-1].content)
    assert told is not None
    assert float(told[1]) <= 1.0, "that is what it was given"


def test_errors_of_the_engine_and_the_host_pass_through():
    with pytest.raises(EngineError):
        solve(Script(EngineError("none")))

    class Gone:
        def read(self, path: str) -> bytes:
            raise SandboxError("host")

    with pytest.raises(SandboxError):
        ToolAgent().solve(TASK, Gone(), Script(call("view", path="a")))


def test_a_sandbox_that_the_policy_broke_is_its_own_error():
    class Broken:
        def python(self, *_: object) -> CommandResult:
            return CommandResult(exit_code=137, output="", broke_sandbox=True)

    result = ToolAgent().solve(TASK, Broken(), Script(call("evaluate")))
    assert (result.exit_status, result.error) == ("agent_error", "The tests ended the sandbox.")


def test_long_answers_are_cut_and_schemas_shown_on_demand():
    script = Script(
        call("rewrite", path="a", start=1, end=0, new_code="z" * 500), call("view", path="a"), call("submit")
    )
    result, _ = solve(script, varied(ToolAgent, most_chars=50), show_tools=True)
    head, note, tail = result.messages[5].content.split("\n")
    assert (len(head), note, len(tail)) == (25, "[... at least 452 characters cut ...]", 25)
    assert [tool["function"]["name"] for tool in json.loads(script.tools)][0] == "view"


LINE = st.sampled_from(
    ["a", "b", "-- x", "++ y", "@@ -1 +1 @@", "", "\\ No newline at end of file", "--- a/f", "+++ b/f"]
)
TEXT = st.builds(
    lambda lines, end: "".join(f"{x}\n" for x in lines) + end,
    st.lists(LINE, max_size=12),
    st.sampled_from(["", "z", "\r"]),
)
FILES = st.dictionaries(st.sampled_from(["f", "d/g", "d/h i"]), TEXT, max_size=3)


@given(FILES, FILES, st.sampled_from([0, 10_000]))
def test_what_is_taken_is_what_is_applied(old, new, most_lines):
    before, patch.MOST_LINES = patch.MOST_LINES, most_lines
    text = "".join(difference(path, old.get(path), new.get(path)) for path in sorted(old | new))
    patch.MOST_LINES = before
    assert apply(msgspec.structs.replace(TASK, files=old), text) == new


@pytest.mark.parametrize(
    "text",
    [
        "--- a/../x\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n",
        "--- /dev/null\n+++ b//etc/passwd\n@@ -0,0 +1 @@\n+x\n",
        "--- /dev/null\n+++ /etc/passwd\n@@ -0,0 +1 @@\n+x\n",
        "--- /dev/null\n+++ b/a/./b\n",
        "--- a/mod.py\n+++ b/gone.py\n",
        "--- /dev/null\n+++ /dev/null\n",
        "--- a/none.py\n+++ b/none.py\n@@ -1 +1 @@\n-x\n+y\n",
        "--- a/mod.py\n+++ b/mod.py\n@@ -1 +1 @@\n-x = 9\n+y\n",
        "--- a/mod.py\n+++ b/mod.py\n@@ -1,2 +1 @@\n-x = 1\n",
        "--- a/mod.py\n+++ b/mod.py\n@@ -1 +1 @@\n-x = 1\n",
        "--- a/mod.py\n+++ b/mod.py\n@@ -1 +1 @@\n?x = 1\n",
        "--- a/mod.py\n",
        "hello\n",
        "@@ -1 +1 @@\n",
    ],
)
def test_a_text_that_is_no_fitting_difference_is_refused(text):
    with pytest.raises(BadPatch):
        apply(TASK, text)


def test_new_deleted_and_unchanged_files_and_what_is_no_part_of_the_work():
    with Process().open(TASK) as sandbox:
        assert take(TASK, sandbox, Process()) == ""
        sandbox.write("new/file.py", b"n\n")
        sandbox.write("binary", b"\xff\xfe")
        sandbox.write("__pycache__/mod.pyc", b"x")
        sandbox.run("rm gone.py; ln -s /etc/passwd link; touch 'a\nb'; touch empty", 10)
        taken = apply(TASK, take(TASK, sandbox, Process()))
        assert taken == {"mod.py": "x = 1\n", "new/file.py": "n\n", "empty": ""}
        sandbox.write("huge", b"x" * 900_000)
        assert "huge" in apply(TASK, take(TASK, sandbox, Process()))
        sandbox.write("huge2", b"x" * 900_000)
        assert take(TASK, sandbox, Process()) == ""
