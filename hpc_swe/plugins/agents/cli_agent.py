"""An agent that is a program of others: any command-line tool that speaks to an OpenAI-style server.

It runs inside the sandbox, and the policy listens there on a port of the sandbox's own loopback, so the
program needs no network, no proxy and no socket file. How an episode ended is judged from what the recorder
refused before what the program says of itself: many exit with 0 when their last request failed. Only a side
call that was refused leaves it to the program.
"""

import json
import math
import shlex

from hpc_swe.errors import ConfigError, SandboxError
from hpc_swe.plugins import Plugin
from hpc_swe.plugins.agents.base import Chat, ChatAddress, Refusal, Result
from hpc_swe.plugins.sandboxes.base import CommandResult, Sandbox
from hpc_swe.plugins.tools.base import cut
from hpc_swe.records import ExitStatus, Message, Task

MODEL = "policy"
PROMPT = "prompt.txt"
_LAY_OUT = """
import json, os
for path, text in json.loads(FILES).items():
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
"""
_STEP_S = 60.0


class CliAgent(Plugin, frozen=True, kw_only=True):
    """Run a command until it ends or a budget is spent.

    In `command`, `environ` and `files` these words are filled in: {prompt_file}, {base_url}, {key}, {model},
    {workdir} and {home}; in `prompt` {task} and {workdir}.
    """

    command: str
    """Shell line, run in the task's work directory."""
    prompt: str = "{task}"
    """What the program is told; {task} and {workdir} are filled in."""
    environ: dict[str, str] = {}
    """Added to HOME, OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL."""
    files: dict[str, str] = {}
    """Path below {home} -> text, written before the command runs."""
    home: str = "/tmp/agent"  # noqa: S108 - of the sandbox
    """HOME. Outside the work directory, or what the program keeps there would be handed in."""
    port: int = 8765
    """Of the sandbox's loopback."""
    max_turns: int = 50
    """Replies that the program gets, those of side calls included."""
    timeout_s: float = 1800.0
    """Of the command, without the seconds at the engines."""
    exit_codes: dict[str, ExitStatus] = {}
    """Beside 0, which is submitted; any other is an agent_error."""
    most_chars: int = 20_000
    """What the record keeps of the program's output."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an exit code that would let the program excuse itself."""
        if ExitStatus.INFRA_ERROR in self.exit_codes.values():
            raise ConfigError("[agent] exit_codes: infra_error is not for a program in the sandbox to claim")

    @property
    def budget_s(self) -> float:
        """Of the program."""
        return self.timeout_s

    def solve(self, task: Task, sandbox: Sandbox, chat: Chat) -> Result:
        """Work on the task until the program ends or a budget is spent."""
        started = chat.clock()
        with chat.serve(sandbox.listen(self.port), self.max_turns) as address:
            command = self._prepare(task, sandbox, address)
            result = sandbox.run(command, self.timeout_s, chat.clock)
        output = cut(result.output, self.most_chars)
        if not chat.messages and chat.refusal is None:
            raise SandboxError(
                f"the agent ended with exit code {result.exit_code} before it got a reply; is [agent] "
                f"command right, and its program among [sandbox] mounts? It said: {output[-500:]!r}"
            )
        status, error = ended(self, result, chat.refusal)
        spent_s = chat.clock() - started
        messages = [*chat.messages, Message(role="tool", content=output)]
        return Result(status, messages, spent_s if math.isfinite(spent_s) else self.timeout_s, error)

    def _prepare(self, task: Task, sandbox: Sandbox, address: ChatAddress) -> str:
        words = {
            "{prompt_file}": f"{self.home}/{PROMPT}",
            "{base_url}": address.url,
            "{key}": address.key,
            "{model}": MODEL,
            "{workdir}": task.workdir,
            "{home}": self.home,
        }
        prompt = self.prompt.replace("{workdir}", task.workdir).replace("{task}", task.prompt)
        texts = {path: _fill(text, words) for path, text in self.files.items()} | {PROMPT: prompt}
        files = {f"{self.home}/{path}": text for path, text in texts.items()}
        laid = sandbox.python(f"FILES = {json.dumps(files)!r}\n{_LAY_OUT}", _STEP_S)
        if laid.exit_code:
            raise SandboxError(f"cannot write the agent's files: {laid.output[-500:]}")
        named = {"HOME": "{home}", "OPENAI_BASE_URL": "{base_url}", "OPENAI_API_KEY": "{key}"}
        environ = named | {"OPENAI_MODEL": "{model}"} | self.environ
        exports = [f"export {name}={shlex.quote(_fill(text, words))}" for name, text in environ.items()]
        return "\n".join([*exports, _fill(self.command, words)])


def ended(agent: CliAgent, result: CommandResult, refusal: Refusal | None) -> tuple[ExitStatus, str]:
    """How a program's episode ended, and what broke."""
    said = f"exit code {result.exit_code}: {result.output[-500:]}"
    known = {"0": ExitStatus.SUBMITTED} | agent.exit_codes
    ended_itself = not (result.broke_sandbox or result.timed_out) and str(result.exit_code) in known
    if refusal is not None and (
        not refusal.is_side_request or (refusal.status.is_truncated and not ended_itself)
    ):
        return refusal.status, refusal.why
    if result.broke_sandbox:
        return ExitStatus.AGENT_ERROR, said
    if result.timed_out:
        return ExitStatus.TOOL_TIME, f"the command took {agent.timeout_s:g} s beside the engine"
    status = known.get(str(result.exit_code), ExitStatus.AGENT_ERROR)
    return status, "" if status == ExitStatus.SUBMITTED else said


def _fill(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text
