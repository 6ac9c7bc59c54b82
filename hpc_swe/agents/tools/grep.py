"""Find lines that match a pattern."""

import re
from pathlib import Path

from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.agents.tools.base import SandboxBroken, Tool, ToolError, below, cut
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Task

_PARTS = Path(__file__).with_name("_text")
_TEXTS = [(_PARTS / part).read_text(encoding="utf-8") for part in ("patterns.py", "search.py")]
_PROGRAM = re.sub(r"(?m)^from hpc_swe.*$", "", "\n\n".join(_TEXTS))


class Grep(Plugin, Tool, frozen=True, kw_only=True):
    """Search text files below a path for a Python regular expression."""

    timeout_s: float = 30.0
    most_matches: int = 100
    most_line_chars: int = 200
    most_chars: int = 8000

    def __call__(
        self, sandbox: Sandbox, task: Task, *, pattern: str, path: str = ".", max_results: int = 0
    ) -> str:
        """Return the matching lines with their numbers, below the name of their file."""
        most = min(max_results, self.most_matches) if max_results > 0 else self.most_matches
        ignored = task.files.get(".debugignore", "")
        arguments = (pattern, below(task, path), most, self.most_line_chars, ignored)
        call = f"sys.stdout.buffer.write(search{arguments!r}.encode(errors='replace'))"
        result = sandbox.python(f"{_PROGRAM}\n\n{call}\n", self.timeout_s)
        if result.broke_sandbox:
            raise SandboxBroken("The search ended the sandbox.")
        if result.timed_out:
            raise ToolError(f"The search took longer than {min(self.timeout_s, result.left_s):g} s.")
        answer = cut(result.output.strip("\n"), self.most_chars)
        if result.exit_code:
            raise ToolError(answer or f"The search ended with exit code {result.exit_code}.")
        return answer
