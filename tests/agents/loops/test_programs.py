"""The programs of configs/agents in the sandbox: what they ask is recorded to the token, however they end."""

import dataclasses
import io
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_swe.agents.loops.base import ChatAddress
from hpc_swe.agents.loops.cli_agent import CliAgent
from hpc_swe.base.errors import EngineError
from hpc_swe.base.records import Episode, ExitStatus, RolloutRequest, Sampling
from hpc_swe.roles.rollout import episode
from hpc_swe.roles.rollout.dialects.base import DialectRequest
from hpc_swe.roles.rollout.openai_server import READ_S, ServedRecorder
from hpc_swe.roles.rollout.openai_server import _Handler as Handler
from hpc_swe.roles.rollout.openai_server import _Server as Server
from hpc_swe.roles.rollout.recorder import OUT_OF_CONTEXT, Exchange
from tests.kit.recording import exact
from tests.kit.sessions_kit import KITS, World, call, configured, overlay
from tests.kit.stage import Rig, rig

pytestmark = pytest.mark.slow
LONGEST_S = 60.0
"""From a fault to the end of a program, on a busy machine; who repeats its requests takes minutes."""
PATH, OLD, NEW = "/testbed/calc/core.py", "a - b", "a + b"
SED = f"sed -i 's/{OLD}/{NEW}/' {PATH}; git diff"
SESSIONS = {
    "claude_code": [
        "Look.\n" + call("Read", file_path=PATH) + "\n" + call("Bash", command="ls"),
        call("Edit", file_path=PATH, old_string=OLD, new_string=NEW),
        "Done.",
    ],
    "codex": [
        "Look.\n" + call("exec_command", cmd=f"cat {PATH}") + "\n" + call("exec_command", cmd="ls"),
        call("exec_command", cmd=SED),
        "Done.",
    ],
    "gemini_cli": [
        "Look.\n" + call("read_file", file_path=PATH) + "\n" + call("run_shell_command", command="ls"),
        call("replace", file_path=PATH, old_string=OLD, new_string=NEW, instruction="Add."),
        "Done.",
    ],
    "mini_swe_agent": [
        "Look.\n" + call("bash", command=f"cat {PATH}"),
        call("bash", command=SED),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ],
    "opencode": [
        "Look.\n" + call("read", filePath=PATH) + "\n" + call("bash", command="ls", description="List."),
        call("edit", filePath=PATH, oldString=OLD, newString=NEW),
        "Done.",
    ],
    "pi": [
        "Look.\n" + call("read", path=PATH) + "\n" + call("bash", command="ls"),
        call("edit", path=PATH, edits=[{"oldText": OLD, "newText": NEW}]),
        "Done.",
    ],
    "openhands": [
        "Look.\n" + call("file_editor", command="view", path=PATH) + "\n" + call("terminal", command="ls"),
        call("file_editor", command="str_replace", path=PATH, old_str=OLD, new_str=NEW),
        call("finish", message="Done."),
    ],
    "qwen_code": [
        "Look.\n" + call("read_file", file_path=PATH) + "\n" + call("run_shell_command", command="ls"),
        call("edit", file_path=PATH, old_string=OLD, new_string=NEW),
        "Done.",
    ],
}
LONG = {
    "claude_code": call("Bash", command="seq 1 20000"),
    "codex": call("exec_command", cmd="seq 1 20000", max_output_tokens=20000),
    "gemini_cli": call("run_shell_command", command="seq 1 20000"),
    "mini_swe_agent": call("bash", command="seq 1 20000"),
    "opencode": call("bash", command="seq 1 20000", description="Count."),
    "pi": call("bash", command="seq 1 20000"),
    "openhands": call("terminal", command="seq 1 20000"),
    "qwen_code": call("run_shell_command", command="seq 1 20000"),
}
SUB_AGENTS: dict[str, tuple[str, dict[str, str], list[str], dict[str, str]]] = {
    "claude_code": (
        "Agent",
        {"description": "Look.", "subagent_type": "general-purpose"},
        [call("Bash", command="ls"), "Seen."],
        {"Read,Write": "Read,Write,Agent"},
    ),
    "gemini_cli": (
        "invoke_agent",
        {"agent_name": "generalist"},
        [call("run_shell_command", command="ls"), call("complete_task", result={"response": "Seen."})],
        {'"core": [': '"core": ["invoke_agent", "complete_task", '},
    ),
    "opencode": (
        "task",
        {"description": "Look.", "subagent_type": "general"},
        [call("bash", command="ls", description="List."), "Seen."],
        {},
    ),
}
"""Programs with sub-agents -> the tool that starts one, its arguments, what one says, what shows the tool."""
COMPACTION = {
    "codex": ("CONTEXT CHECKPOINT", {"web_search =": "model_auto_compact_token_limit = 36000\nweb_search ="}),
    "opencode": (
        "summarization agent",
        {'"context": 1000000, "output": 20000': '"context": 48000, "output": 1000'},
    ),
    "pi": (
        "context summarization",
        {
            '"contextWindow": 1000000': '"contextWindow": 30000',
            '"maxTokens": 20000': '"maxTokens": 1000',
            '"retry"': '"compaction": {"reserveTokens": 2000, "keepRecentTokens": 1000}, "retry"',
        },
    ),
}
"""Programs that sum up before a context is full -> words of their request, and what lets it come early."""
TIME_LIMITS = {
    "claude_code": {"86400000": "1500"},
    "gemini_cli": {'"86400"': '"1"'},
    "opencode": {'"headerTimeout": false': '"headerTimeout": 1500'},
    "pi": {'"disabled"': "1500"},
    "qwen_code": {"86400000": "1500"},
}
"""Programs with a limit, of 60 to 300 s if none is set -> what makes it short."""


@pytest.fixture(params=SESSIONS)
def program(request: pytest.FixtureRequest) -> str:
    """Name of a program's configuration whose kit is there."""
    return there(request.param)


def there(name: str) -> str:
    kit = name.replace("_", "-")
    if not (KITS / kit / "stamp").exists():
        pytest.skip(f"{kit} is not installed: containers/build_agents.sh {kit}")
    return name


def made(
    world: World,
    name: str,
    folder: Path,
    replies: list[str],
    *,
    context: int = 200_000,
    wait_s: float = 60.0,
    **changes: object,
) -> Rig:
    folder.mkdir(exist_ok=True)
    config = configured(name, overlay(world, [], folder / "run.toml"), engine="vllm")
    (task,) = config.taskset.load("train")
    agent = replace(config.agent, **changes)
    on = rig(folder / "run", folder / "toy", agent, config.sandbox, replies, wait_s, context=context)
    on.means = dataclasses.replace(on.means, tasks={task.task_id: task})
    return on


def played(on: Rig) -> Episode:
    (task_id,) = on.means.tasks
    request = RolloutRequest(group_id=0, index=0, task_id=task_id, seed=0, sampling=Sampling(max_tokens=500))
    recorder = on.means.recorder(request)
    return episode.record(request, recorder, episode.play(on.means, request, recorder), "test")


def test_a_session_is_one_exact_chain(world: World, program: str, tmp_path: Path) -> None:
    on = made(world, program, tmp_path, SESSIONS[program])
    done = played(on)
    assert (done.exit_status, done.error) == (ExitStatus.SUBMITTED, "")
    assert [turn.parent for turn in exact(done.turns, on.engine)] == [None, 0, 1]
    assert f"+    return {NEW}" in done.submission
    assert done.counts["undelivered"] == done.counts["parse_errors"] == 0


def test_a_full_context_ends_a_session_at_once(world: World, program: str, tmp_path: Path) -> None:
    # Each call differs, since qwen-code ends with code 1 after five equal ones.
    calls = [LONG[program].replace("20000", str(20000 + turn)) for turn in range(40)]
    on = made(world, program, tmp_path, calls, context=100_000)
    on.engine.apart = {"It was counted.": ["Done."], "<summary>": ["<summary>It was counted.</summary>"]}
    done = played(on)
    turns = exact(done.turns, on.engine)
    if program == "claude_code":  # which lets its history be summed up, and goes on
        assert (done.exit_status, done.error) == (ExitStatus.SUBMITTED, "")
        assert turns[-1].parent is None
    else:
        assert done.exit_status == ExitStatus.CONTEXT, done.error
        assert "prompt is too long" in done.error or done.error == OUT_OF_CONTEXT.why


def test_the_last_turn_and_a_failed_engine_end_a_session_at_once(
    world: World, program: str, tmp_path: Path
) -> None:
    done = played(made(world, program, tmp_path / "turns", SESSIONS[program], max_turns=1))
    assert (done.exit_status, len(done.turns)) == (ExitStatus.MAX_TURNS, 1), done.error
    on = made(world, program, tmp_path / "engine", SESSIONS[program], wait_s=1.0)
    on.engine.faults = deque([None, *[EngineError("gone")] * 50])
    done = played(on)
    assert (done.exit_status, len(done.turns)) == (ExitStatus.INFRA_ERROR, 1), done.error


class Cut(io.BufferedIOBase):
    """Send these shares of what is written, then nothing: a connection that is lost on the way."""

    def __init__(self, connection: socket.socket, *shares: float) -> None:
        self.connection, self.shares = connection, deque(shares)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        share = self.shares.popleft()
        self.connection.sendall(data[: int(len(data) * share)])
        if share < 1:
            raise ConnectionResetError("cut")
        return len(data)


HEAD, MIDDLE = (0.0,), (1.0, 0.5)


class FaultyHandler(Handler):
    """Refuse every request after the first reply, or cut the replies that follow it."""

    def do_POST(self) -> None:
        recorder = self.server.recorder
        if not isinstance(recorder, Faulty) or not recorder.status or not recorder.has_sampled:
            return super().do_POST()
        recorder.faults.append(time.monotonic())
        self._body()
        return self._refuse(recorder.status, "No.", "no")

    def _answer(self, request: DialectRequest, exchange: Exchange) -> None:
        recorder = self.server.recorder
        if isinstance(recorder, Faulty) and exchange.index and recorder.cuts:
            self.wfile = Cut(self.connection, *recorder.cuts.popleft())
            recorder.faults.append(time.monotonic())
        super()._answer(request, exchange)


class Faulty(ServedRecorder):
    status = 0
    cuts: deque[tuple[float, ...]]
    faults: list[float]

    @contextmanager
    def serve(
        self, listener: socket.socket, most_turns: int, read_s: float = READ_S
    ) -> Iterator[ChatAddress]:
        self.turns_left, self.faults = most_turns, []
        server = Server(self, listener, read_s)
        server.RequestHandlerClass = FaultyHandler
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield ChatAddress(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", server.key)
        finally:
            server.shutdown()
            server.server_close()


def faulty(on: Rig, status: int = 0, *cuts: tuple[float, ...]) -> tuple[Episode, Faulty]:
    (task_id,) = on.means.tasks
    request = RolloutRequest(group_id=0, index=0, task_id=task_id, seed=0, sampling=Sampling(max_tokens=500))
    recorder = Faulty(on.means.builder, on.means.sampler, request, on.means.config)
    recorder.status, recorder.cuts = status, deque(cuts)
    done = episode.record(request, recorder, episode.play(on.means, request, recorder), "test")
    assert time.monotonic() - recorder.faults[0] < LONGEST_S, (status, len(recorder.faults), done.error)
    return done, recorder


def test_a_refusal_of_any_status_ends_a_session_within_seconds(
    world: World, program: str, tmp_path: Path
) -> None:
    """Our server itself has no 429 and no 500."""
    for status in (401, 404, 429, 500):
        done, _ = faulty(made(world, program, tmp_path / str(status), SESSIONS[program]), status)
        assert (done.exit_status, len(done.turns)) == (ExitStatus.AGENT_ERROR, 1), (status, done.error)


def test_a_session_outlives_cut_replies_or_ends_at_once(world: World, program: str, tmp_path: Path) -> None:
    """A reply is lost before its first byte and in its middle, in one session if the program goes on."""
    cuts = deque([HEAD, MIDDLE])
    while cuts:
        on = made(world, program, tmp_path / str(len(cuts)), SESSIONS[program])
        done, recorder = faulty(on, 0, *cuts)
        assert [turn.delivered for turn in exact(done.turns, on.engine)].count(False) == len(recorder.faults)
        goes_on = f"+    return {NEW}" in done.submission
        assert done.exit_status == (ExitStatus.SUBMITTED if goes_on else ExitStatus.AGENT_ERROR), done.error
        assert done.counts["chains"] == 1
        for _ in recorder.faults:
            cuts.popleft()


def changed(on: Rig, changes: Mapping[str, str]) -> None:
    """Replace texts of the program's command, files and environment."""
    agent = on.means.agent
    assert isinstance(agent, CliAgent)
    texts = {"": agent.command} | agent.files | agent.environ
    for old, new in changes.items():
        assert any(old in text for text in texts.values()), old
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    files, environ = ({name: texts[name] for name in names} for names in (agent.files, agent.environ))
    agent = replace(agent, command=texts[""], files=files, environ=environ)
    on.means = dataclasses.replace(on.means, agent=agent)


@pytest.mark.parametrize("name", TIME_LIMITS)
def test_the_time_limit_of_a_request_is_the_one_that_is_set(world: World, tmp_path: Path, name: str) -> None:
    """With a short one a slow engine loses its reply, so the long one of the configuration counts."""
    on = made(world, there(name), tmp_path, SESSIONS[name])
    changed(on, TIME_LIMITS[name])
    on.engine.on_call = lambda call: time.sleep(8.0 if len(on.engine.calls) == 2 else 0.0)
    done = played(on)
    assert len(on.engine.calls) > 3 or done.exit_status == ExitStatus.AGENT_ERROR, done.error


@pytest.mark.parametrize("name", SUB_AGENTS)
def test_parallel_sub_agents_are_exact_chains(world: World, tmp_path: Path, name: str) -> None:
    tool, arguments, replies, changes = SUB_AGENTS[name]
    tasks = [call(tool, prompt=f"Look into {one}.", **arguments) for one in ("this one", "that one")]
    on = made(world, there(name), tmp_path, ["Two.\n" + "\n".join(tasks), "Done."])
    changed(on, changes)
    on.engine.apart = {"\nLook into th": replies}
    done = played(on)
    turns = exact(done.turns, on.engine)
    assert done.exit_status == ExitStatus.SUBMITTED, done.error
    assert done.counts["chains"] == 3, [turn.parent for turn in turns]


@pytest.mark.parametrize("name", COMPACTION)
def test_a_compaction_and_what_follows_are_exact_chains(world: World, tmp_path: Path, name: str) -> None:
    asks, changes = COMPACTION[name]
    on = made(
        world,
        there(name),
        tmp_path,
        [LONG[name], LONG[name].replace("20000", "20001", 1), SESSIONS[name][1], "Done."],
    )
    changed(on, changes)
    on.engine.apart = {asks: ["It was counted."], "It was counted.": [*[SESSIONS[name][1]] * 3, "Done."]}
    done = played(on)
    turns = exact(done.turns, on.engine)
    assert done.exit_status == ExitStatus.SUBMITTED, done.error
    assert f"+    return {NEW}" in done.submission
    assert [turn.parent for turn in turns].count(None) == 3, "the history, its summary, what follows"


def test_qwen_code_sums_up_a_full_context_when_refused_and_goes_on(world: World, tmp_path: Path) -> None:
    name = there("qwen_code")
    on = made(world, name, tmp_path, [LONG[name], LONG[name].replace("20000", "20001")], context=40_000)
    summary = "<state_snapshot>It was counted.</state_snapshot>"
    sed = call("run_shell_command", command=SED)
    on.engine.apart = {"produce the <state_snapshot>": [summary], "It was counted.": [*[sed] * 3, "Done."]}
    done = played(on)
    exact(done.turns, on.engine)
    assert (done.exit_status, done.counts["context_full"]) == (ExitStatus.SUBMITTED, 1), done.error
    assert f"+    return {NEW}" in done.submission
