"""A grader whose process a submission can end, as some fault of ours might let it."""

import os
import signal
from pathlib import Path

from hpc_swe.agents.sandboxes.base import Sandboxes
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Score, Task
from hpc_swe.tasks.graders.base import Grader


class Deadly(Plugin, Grader, frozen=True, kw_only=True):
    unresolved_reward: float = -0.5
    looks: str = ""
    """A file with a line for each grading."""

    def grade(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        with Path(self.looks).open("a") as looks:
            looks.write(f"{os.getpid()}\n")
        if submission == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return Score(outcome="resolved", reward=1.0)
