"""Core-seconds of recorded episodes by tool: python -m tests.bench.replay RUN [EPISODES]

The calls of a finished evaluation's episodes are carried out again, one episode after another, in sandboxes
of the run's type, and their patches are graded. Nothing is sampled, so the rest of the run's time is that of
its engines, of the workers' requests to them and of the records.
"""

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from hpc_swe.agents.loops.base import Reply
from hpc_swe.base.records import Message
from hpc_swe.base.tables import console, table
from hpc_swe.cluster.processes import descendants
from hpc_swe.makers.export_episodes import RunExport
from hpc_swe.tasks import patch
from jobs.reward import graded

TICKS = os.sysconf("SC_CLK_TCK")


def spent_s() -> float:
    """Return the processor time of this process and all below it, also of those that have ended."""
    total = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it ended meanwhile, and counts for its parent
            continue
        total += sum(map(int, fields[11:15]))
    return total / TICKS


@dataclass
class Ledger:
    """Sum what was spent since the last entry."""

    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    since_s: float = field(default_factory=spent_s)
    looked_s: float = 0.0
    """Processor time of looking, which is nobody's."""

    def enter(self, name: str) -> None:
        began_s = time.process_time()
        now_s = spent_s() - self.looked_s
        self.looked_s += time.process_time() - began_s
        self.spent[name] += now_s - self.since_s
        self.calls[name] += 1
        self.since_s = now_s


@dataclass
class Recorded:
    """Answer as the policy did."""

    ledger: Ledger
    replies: list[Message]
    doing: str = "open a sandbox"

    def __call__(self, messages: Sequence[Message], tools: str = "") -> Reply:
        self.ledger.enter(self.doing)
        reply = self.replies.pop(0) if self.replies else Message(role="assistant", content="")
        self.doing = reply.tool_calls[0].name if reply.tool_calls else "no call"
        return Reply(content=reply.content, tool_calls=reply.tool_calls)


def main(run: str, most: str = "100") -> None:
    """Print the table."""
    export = RunExport(Path(run))
    config, tasks, ledger, count = export.config, graded(export.run), Ledger(), 0
    for scored in islice(export.episodes(), int(most)):
        task = tasks[scored.episode.request.task_id]
        replies = [message for message in scored.episode.messages if message.role == "assistant"]
        chat = Recorded(ledger, replies)
        with config.sandbox.open(task) as sandbox:
            config.agent.solve(task, sandbox, chat)
            ledger.enter(chat.doing)
            made = patch.take(task, sandbox, config.sandbox)
        ledger.enter("patch")
        config.grader.grade(task, made, config.sandbox)
        ledger.enter("grading")
        count += 1
    rows = table(("", "an episode", "core-seconds of each", "core-seconds an episode"))
    for name, spent in sorted(ledger.spent.items(), key=lambda each: -each[1]):
        calls = ledger.calls[name]
        rows.add_row(name, f"{calls / count:.2f}", f"{spent / calls:.3f}", f"{spent / count:.3f}")
    rows.add_row(f"all {count}", "", "", f"{sum(ledger.spent.values()) / count:.3f}")
    console.print(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
