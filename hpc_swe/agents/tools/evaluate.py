"""Run the tests that the agent can see."""

from hpc_swe.agents import pytest_command
from hpc_swe.agents.sandboxes.base import CommandResult, Sandbox
from hpc_swe.agents.tools.base import SandboxBroken, Tool, ToolError
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Task


class Evaluate(Plugin, Tool, frozen=True, kw_only=True):
    """Run the visible tests."""

    timeout_s: float = 60.0
    options: tuple[str, ...] = ("-q", "--tb=line", "--no-header", "-rN")
    most_chars: int = 1000

    def __call__(self, sandbox: Sandbox, task: Task) -> str:
        """Return the end of pytest's output; raise ToolError if the task shows no tests."""
        return self.words(self.run(sandbox, task))

    def run(self, sandbox: Sandbox, task: Task) -> CommandResult:
        """Run the tests; raise ToolError if the task shows none, or they ended the sandbox."""
        if problem := self.why_not(task):
            raise ToolError(problem)
        visible = pytest_command.visible(task)
        options = [*pytest_command.own_settings(task.files), *self.options]
        result = sandbox.python(pytest_command.program([*options, *visible]), self.timeout_s)
        if result.broke_sandbox:
            raise SandboxBroken("The tests ended the sandbox.")
        return result

    def words(self, result: CommandResult) -> str:
        """Return the end of a run's output, for the policy."""
        if result.timed_out:
            return f"The tests ran longer than {min(self.timeout_s, result.left_s):g} s."
        return result.output.strip()[-self.most_chars :]

    def why_not(self, task: Task) -> str:
        return "" if pytest_command.visible(task) else "There are no visible tests."
