"""Run a shell command."""

from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.agents.tools.base import SandboxBroken, Tool, ToolError, cut
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Task

_MOST_BYTES = 100_000
"""Linux accepts 131,072 bytes as one argument; a longer command would fail on the host's side."""


class Bash(Plugin, Tool, frozen=True, kw_only=True):
    """Run a command in a fresh bash in the work directory; nothing that it starts outlives it."""

    most_timeout_s: float = 600.0
    most_chars: int = 8000

    def __call__(self, sandbox: Sandbox, task: Task, *, command: str, timeout_s: float = 60.0) -> str:
        """Return output and errors in their order, and how the command ended."""
        # Written so that NaN, which a lenient conversion of numbers accepts, is refused as well.
        if not 0 < timeout_s <= self.most_timeout_s:
            raise ToolError(f"timeout_s must be above 0 and at most {self.most_timeout_s:g}.")
        if "\0" in command or len(command.encode()) > _MOST_BYTES:
            raise ToolError(f"A command has no NUL and at most {_MOST_BYTES} bytes; write a file and run it.")
        result = sandbox.run(command, timeout_s)
        if result.broke_sandbox:
            raise SandboxBroken("The command ended the sandbox.")
        stopped = f"stopped after {min(timeout_s, result.left_s):g} s"
        ended = stopped if result.timed_out else f"exit code {result.exit_code}"
        return f"{cut(result.output.rstrip(), self.most_chars)}\n[{ended}]".lstrip("\n")
