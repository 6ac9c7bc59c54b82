"""Grade a patch with the script of the task's tests, which writes a number from 0 to 1 into a file.

The script comes into a fresh sandbox after the patch, and no agent has seen it. Files that set up tests are
left out of the patch, and a link out of the work directory is a cheat, since it may lead to the tests.
Nothing proves the result: code of the patch that the tests run can write that file.
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
_FOLDER = "/logs/verifier"
_REWARD = f"{_FOLDER}/reward.txt"
# A pipe would be waited for, and what the script cannot write, such as the target of a link, is not its own.
# A script may move a file to this place, for which it writes the folder.
_IS_OURS = f"[ -f {_REWARD} ] && [ ! -L {_REWARD} ] && [ -w {_REWARD} ] && [ -w {_FOLDER} ]"
_SIGNALLED = 128
"""Exit codes above are those of a shell, or its last command, that a signal ended."""
_LEFT_OUT = [*SET_UP, "pytest.py", "pytest/*", "_pytest/*", "pluggy/*"]
_PATCH, _TOUCHED = ".git/agent.patch", ".git/touched"
# A link is judged by its text as well: /proc/self leads each process elsewhere.
_FIND_LINKS = f"""
import os
here = os.path.realpath(".")
with open({_TOUCHED!r}, "rb") as file:
    touched = [os.fsdecode(line.split(b"\\t", 2)[2]) for line in file.read().split(b"\\0")[:-1]]
for path in filter(os.path.islink, touched):
    named = os.path.normpath(os.path.join(here, os.path.dirname(path), os.readlink(path)))
    first = [os.path.relpath(to, here).split("/")[0] for to in (named, os.path.realpath(path))]
    if not {{"..", ".git"}}.isdisjoint(first):
        print(path, "leads out of the work directory")
"""


@dataclass(frozen=True)
class _Ran:
    """A script has ended, and has written something into its file; or the patch was refused before."""

    result: CommandResult
    written: str = ""
    is_cheat: bool = False


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
        if ran.is_cheat:
            return self.score(task, "cheated", (), ran.result.output, time.monotonic() - started)
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
            applied = _apply(task, patch, sandbox)
            if applied.exit_code:
                return _Ran(applied)
            links = _by_host(sandbox.python(_FIND_LINKS, _STEP_S), "the search for links")
            if links.exit_code or links.output:
                return _Ran(links, is_cheat=not links.exit_code)
        result = _bash(sandbox, task.tests.command, task.tests.timeout_s)
        if result.timed_out or result.broke_sandbox or result.exit_code > _SIGNALLED:
            return _Ran(result)
        found = sandbox.run(f"{_IS_OURS} && head -c 100 {_REWARD}", _STEP_S)
        return _Ran(result, "" if found.exit_code else found.output.strip())


def _apply(task: Task, patch: str, sandbox: Sandbox) -> CommandResult:
    """Apply a patch but for what sets up tests, and list the files that it touches in `_TOUCHED`."""
    add_files(sandbox, {_PATCH: patch}, "write the patch")
    apply = f"git apply --whitespace=nowarn {_swebench.apply_options(task, _LEFT_OUT)} {_PATCH}"
    command = f"{apply} --numstat -z > {_TOUCHED} && {apply}"
    return _by_host(sandbox.run(command, _STEP_S), "git apply")


def _by_host(result: CommandResult, what: str) -> CommandResult:
    """Return how a command ended; raise SandboxError if it did not, since no code of the patch has run."""
    if result.timed_out or result.broke_sandbox:
        raise SandboxError(f"{what}: {ending(result)}")
    return result


def _bash(sandbox: Sandbox, script: str, timeout_s: float) -> CommandResult:
    add_files(sandbox, {".git/script.sh": script}, "write a script of the task")
    return sandbox.run(". .git/script.sh", timeout_s)  # read whole at first: code may append to the file


def _share(written: str) -> float:
    try:
        share = float(written)
    except ValueError:
        return 0.0
    return share if 0 <= share <= 1 else 0.0
