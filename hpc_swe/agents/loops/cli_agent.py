"""Run an existing program as the agent: any command-line tool that asks a server of a known API.

The program runs inside the sandbox, and the policy listens there on a port of the sandbox's own loopback. So
the program needs no network, no proxy and no socket file. What the recorder refused decides how an episode
ended, before the program's own exit code does: many programs exit with 0 when their last request failed. Only
after a refused side request the exit code decides.
"""

import json
import math
import shlex
from typing import ClassVar

from hpc_swe.agents.loops.base import Agent, Chat, ChatAddress, Refusal, Result
from hpc_swe.agents.sandboxes.base import CommandResult, Sandbox
from hpc_swe.agents.tools.base import cut
from hpc_swe.base.errors import ConfigError, SandboxError
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import ExitStatus, Message, Task

MODEL = "policy"
PROMPT = "prompt.txt"
PORT = 8765  # of the sandbox's loopback, which nobody else uses
_WRITE_FILES = """
import json, os
for path, text in json.loads(FILES).items():
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
"""
_WRITE_TIMEOUT_S = 60.0


class CliAgent(Plugin, Agent, frozen=True, kw_only=True):
    """Run a command until it ends or a budget is spent.

    In `command`, `environ` and `files` these words are replaced: {prompt_file}, {base_url}, {root_url} (the
    former without /v1), {key}, {model}, {workdir} and {home}; in `prompt` {task} and {workdir}.
    """

    command: str
    """Shell command, run in the task's work directory."""
    prompt: str = "{task}"
    """Prompt for the program; {task} and {workdir} are replaced."""
    environ: dict[str, str] = {}
    """Added to HOME, OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL."""
    files: dict[str, str] = {}
    """Path below {home} -> text, written before the command runs."""
    max_turns: int = 50
    """Replies that the program gets, those of side requests included."""
    timeout_s: float = 1800.0
    """Seconds that the command may take, without those at the engines."""
    exit_codes: dict[str, ExitStatus] = {}
    """Exit code -> how the episode ended, besides 0, which is submitted; any other is an agent_error."""
    most_chars: ClassVar[int] = 20_000  # of the program's output, in the record
    # Outside the work directory: what the program stores in HOME must not become part of the patch.
    home: ClassVar[str] = "/tmp/agent"  # noqa: S108 - of the sandbox

    def __post_init__(self) -> None:
        """Raise ConfigError for an exit code with which the program could avoid a reward."""
        if ExitStatus.INFRA_ERROR in self.exit_codes.values():
            raise ConfigError("[agent] exit_codes: a program in the sandbox must not claim infra_error")

    @property
    def budget_s(self) -> float:
        return self.timeout_s

    def solve(self, task: Task, sandbox: Sandbox, chat: Chat) -> Result:
        started = chat.clock()
        with chat.serve(sandbox.listen(PORT), self.max_turns) as address:
            result = sandbox.run(self._prepare(task, sandbox, address), self.timeout_s, chat.clock)
        output = cut(result.output, self.most_chars)
        if not chat.messages and chat.refusal is None:
            raise SandboxError(
                f"the agent ended with exit code {result.exit_code} before it got a reply; is [agent] "
                f"command right, and its program among [sandbox] mounts? Its output: {output[-500:]!r}"
            )
        status, error = outcome(self, result, chat.refusal)
        spent_s = chat.clock() - started
        messages = [*chat.messages, Message(role="tool", content=output)]
        return Result(status, messages, spent_s if math.isfinite(spent_s) else self.timeout_s, error)

    def _prepare(self, task: Task, sandbox: Sandbox, address: ChatAddress) -> str:
        words = {
            "{prompt_file}": f"{self.home}/{PROMPT}",
            "{base_url}": address.url,
            "{root_url}": address.url.removesuffix("/v1"),
            "{key}": address.key,
            "{model}": MODEL,
            "{workdir}": task.workdir,
            "{home}": self.home,
        }
        prompt = self.prompt.replace("{workdir}", task.workdir).replace("{task}", task.prompt)
        texts = {path: _fill(text, words) for path, text in self.files.items()} | {PROMPT: prompt}
        files = {f"{self.home}/{path}": text for path, text in texts.items()}
        written = sandbox.python(f"FILES = {json.dumps(files)!r}\n{_WRITE_FILES}", _WRITE_TIMEOUT_S)
        if written.exit_code:
            raise SandboxError(f"cannot write the agent's files: {written.output[-500:]}")
        named = {"HOME": "{home}", "OPENAI_BASE_URL": "{base_url}", "OPENAI_API_KEY": "{key}"}
        environ = named | {"OPENAI_MODEL": "{model}"} | self.environ
        exports = [f"export {name}={shlex.quote(_fill(text, words))}" for name, text in environ.items()]
        return "\n".join([*exports, _fill(self.command, words)])


def outcome(agent: CliAgent, result: CommandResult, refusal: Refusal | None) -> tuple[ExitStatus, str]:
    """Return how a program's episode ended, and the error, if any."""
    message = f"exit code {result.exit_code}: {result.output[-500:]}"
    known = {"0": ExitStatus.SUBMITTED} | agent.exit_codes
    ended_itself = not (result.broke_sandbox or result.timed_out) and str(result.exit_code) in known
    if refusal is not None and (
        not refusal.is_side_request or (refusal.status.is_truncated and not ended_itself)
    ):
        return refusal.status, refusal.why
    if result.broke_sandbox:
        return ExitStatus.AGENT_ERROR, message
    if result.timed_out:
        return ExitStatus.TOOL_TIME, f"the command took {agent.timeout_s:g} s, without those at the engines"
    status = known.get(str(result.exit_code), ExitStatus.AGENT_ERROR)
    return status, "" if status == ExitStatus.SUBMITTED else message


def _fill(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text
