"""Run the tests of a source or of a mutant in a sandbox, from the host's side."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hpc_swe.agents.sandboxes.base import Sandboxes
from hpc_swe.base.records import Task, TestPlan

_PROGRAM = Path(__file__).with_name("_trial.py")
_LONGEST = 5
"""How many times its time-out a run may take that waits for a processor."""


class TestRun(msgspec.Struct, frozen=True):
    """Say how one test of a trial has ended."""

    __test__ = False  # pytest must not collect this class
    name: str
    """Qualified name of its function; empty if it has none."""
    outcome: str
    """Empty if it did not come to an end."""
    seconds: float
    lines: str
    """Lines of the traced file that it ran, as the bits of a hexadecimal number."""

    @property
    def has_passed(self) -> bool:
        """Return whether it passed."""
        return self.outcome == "passed"

    def ran(self, first: int, last: int) -> bool:
        """Return whether it ran one of the lines from first to last."""
        return bool(int(self.lines, 16) >> first & (1 << (last - first + 1)) - 1)


class TrialResult(msgspec.Struct, frozen=True):
    """Hold the results of a run of pytest."""

    code: int
    seconds: float
    tests: dict[str, TestRun]
    loaded: list[str]
    """Files of the work directory that were imported."""
    modules: list[str]
    """Names of all top modules that were imported."""
    imported: list[str]
    """Files of all modules that were imported."""


class TrialPlace(msgspec.Struct, frozen=True):
    """A place says where trials run."""

    sandboxes: Sandboxes
    image: str
    workdir: str

    def task(
        self,
        files: Mapping[str, str],
        absent: Sequence[str],
        tests: TestPlan | None = None,
        task_id: str = "trial",
    ) -> Task:
        """Return a task of these files, with the image of this place."""
        return Task(
            task_id=task_id,
            taskset="bugs",
            prompt="",
            image=self.image,
            workdir=self.workdir,
            files=dict(files),
            absent=list(absent),
            tests=tests or TestPlan(command="", fail_to_pass=[], timeout_s=0.0),
        )

    def run(
        self, task: Task, arguments: Sequence[str], wanted: Sequence[str], timeout_s: float, traced: str = ""
    ) -> TrialResult | None:
        """Run tests in a fresh sandbox; None if they did not end in time, or ended the process.

        Raise SandboxError if the host failed.
        """
        out = f".{secrets.token_hex(8)}"
        call = f"main{(out, [*arguments], [*wanted], traced)!r}\n"
        with self.sandboxes.open(task) as sandbox:
            program = f"{_PROGRAM.read_text(encoding='utf-8')}\n\n{call}"
            result = sandbox.python(program, timeout_s, _LONGEST * timeout_s)
            if result.timed_out:
                return None
            try:
                return msgspec.json.decode(sandbox.read(out), type=TrialResult)
            except (OSError, msgspec.MsgspecError):
                return None
