"""Grade a patch with the script of the task's tests, which writes a number from 0 to 1 into a file.

The script comes into a fresh sandbox after the patch, and no agent has seen it. Files that set up tests are
left out of the patch. Nothing proves the result: code of the patch that the tests run can write that file.
"""

import time
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from hpc_swe.agents.sandboxes.base import CommandResult, Sandbox, Sandboxes, add_files
from hpc_swe.base.errors import ConfigError, SandboxError
from hpc_swe.base.records import Outcome, Score, Task
from hpc_swe.tasks.graders import _swebench
from hpc_swe.tasks.graders.base import RESOLVED, HiddenTestGrader, ending
from hpc_swe.tasks.patch import take
from hpc_swe.tasks.second_run import run_reliably
from hpc_swe.tasks.swebench_rows import SET_UP

_STEP_S = 120.0
_REWARD = "/logs/verifier/reward.txt"


@dataclass(frozen=True)
class _Ran:
    """A script has ended, and has written something into its file."""

    result: CommandResult
    written: str = ""


class RewardFile(HiddenTestGrader, frozen=True, kw_only=True):
    """A patch resolves a task when the script of its tests writes 1."""

    unresolved_reward: float = 0.0
    """Reward where the script writes 0, or nothing; rewards of other numbers lie between this and 1."""

    def grade(self, task: Task, patch: str, sandboxes: Sandboxes) -> Score:
        """Grade a patch; an empty one starts no sandbox."""
        if "solution" not in task.tests.extra:
            raise ConfigError(f"[grader] reward_file judges folders of Harbor; {task.task_id} is none")
        if not patch.strip():
            return Score(outcome="no_submission", reward=self.unresolved_reward)
        return self.examine(task, patch, sandboxes)

    def examine(self, task: Task, patch: str, sandboxes: Sandboxes) -> Score:
        """Grade a patch, and run the tests even when it is empty."""
        started, limit_s = time.monotonic(), task.tests.timeout_s
        ran = run_reliably(partial(_run, task, patch, sandboxes), lambda ran: ran.result.timed_out, limit_s)
        share = _share(ran.written)
        outcome: Outcome = "resolved" if share == 1 else "unresolved"
        passed = task.tests.fail_to_pass if share == 1 else []
        detail = f"{_REWARD} has {ran.written!r}, of 0 to 1; {ending(ran.result)}"
        score = self.score(task, outcome, passed, detail, time.monotonic() - started)
        return replace(score, reward=self.unresolved_reward + share * (RESOLVED - self.unresolved_reward))

    def reference(self, task: Task, sandboxes: Sandboxes) -> str | None:
        """Return the patch that the task's solution/solve.sh makes; None if it has none."""
        script = task.tests.extra["solution"]
        if not script:
            return None
        with sandboxes.open(task) as sandbox:
            done = _bash(sandbox, script, task.tests.timeout_s)
            if done.exit_code:
                raise SandboxError(f"solution/solve.sh of {task.task_id}: {ending(done)}")
            return take(task, sandbox, sandboxes)


def _run(task: Task, patch: str, sandboxes: Sandboxes) -> _Ran:
    with sandboxes.open(task) as sandbox:
        if patch.strip():
            add_files(sandbox, {".git/agent.patch": patch}, "write the patch")
            options = _swebench.apply_options(task, SET_UP)
            applied = sandbox.run(f"git apply --whitespace=nowarn {options} .git/agent.patch", _STEP_S)
            if applied.exit_code:
                return _Ran(applied)
        result = _bash(sandbox, task.tests.command, task.tests.timeout_s)
        found = sandbox.run(f"head -c 100 {_REWARD}", _STEP_S)
        return _Ran(result, "" if found.exit_code else found.output.strip())


def _bash(sandbox: Sandbox, script: str, timeout_s: float) -> CommandResult:
    add_files(sandbox, {".git/script.sh": script}, "write a script of the task")
    return sandbox.run("bash .git/script.sh", timeout_s)


def _share(written: str) -> float:
    try:
        share = float(written)
    except ValueError:
        return 0.0
    return share if 0 <= share <= 1 else 0.0
