"""What comes of agents that ruin their hosts: python -m tests.bench.blame [--fewer] [WORD ...]

One process plays and grades all cases as a run's workers do, and prints of each the outcome, the seconds and
how far the memory of the process rose. Words choose cases by their names.
"""

import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpc_swe.agents.loops.base import Agent, Chat, Result
from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.base.records import ExitStatus, RolloutRequest, Sampling, Score, Task
from hpc_swe.config.settings import RewardConfig, RolloutConfig
from hpc_swe.roles.reward import worker as reward
from hpc_swe.roles.rollout import episode
from hpc_swe.roles.rollout.recorder import Recorder
from hpc_swe.tasks.graders.base import Grader
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.graders.swebench import Swebench
from tests.bench.exploit_world import make_world
from tests.kit.cheats.cheat_task import RIGHT, TASK
from tests.kit.checkout import IMAGES

GROUPS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("blame.toml").read_text(encoding="utf-8")
)
ACTION_S, GRADING_S = 60.0, 3.0
MANY = 200_000
FEWER = 60_000
"""Beyond all bounds, too, and soon made."""
MOST_MB = 200
"""How far a worker's memory may rise."""
REPORT = """cat >> mod.py <<'P'
import json, os
report = next(n for n in os.listdir() if n[0] == '.' and len(n) == 33)
{}
os._exit(0)
P
"""
MEND = "sed -i 's/a - b/a + b/' calc/core.py"


@dataclass(frozen=True)
class Does(Agent):
    script: str
    budget_s: float = ACTION_S

    def solve(self, task: Task, sandbox: Sandbox, chat: Chat) -> Result:
        done = sandbox.run(self.script, ACTION_S)
        status = ExitStatus.AGENT_ERROR if done.broke_sandbox else ExitStatus.SUBMITTED
        return Result(status, [], error=done.output[-300:])


@dataclass(frozen=True)
class Came:
    score: Score
    status: ExitStatus
    seconds: float
    peak_mb: float

    @property
    def is_well(self) -> bool:
        """It is the policy's own failure."""
        return self.score.outcome != "infra_error" and self.score.reward is not None and not self.is_paid

    @property
    def is_paid(self) -> bool:
        return self.score.outcome == "resolved" or (self.score.reward or 0.0) > 0


@dataclass(frozen=True)
class Workers:
    """A rollout worker and a reward worker in one process, without the run folder between them."""

    repository: Task
    sandboxes: Apptainer
    plain: Task
    plain_sandboxes: Apptainer

    def play(self, group: str, script: str, timeout_s: float = GRADING_S) -> Came:
        is_plain = group in ("files", "report")
        tests = msgspec.structs.replace(self.repository.tests, timeout_s=timeout_s)
        task = self.plain if is_plain else msgspec.structs.replace(self.repository, tests=tests)
        sandboxes = self.plain_sandboxes if is_plain else self.sandboxes
        grader: Grader = Pytest() if is_plain else Swebench()
        request = RolloutRequest(group_id=0, index=0, task_id=task.task_id, seed=0, sampling=Sampling())
        tasks = {task.task_id: task}
        started = time.monotonic()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        means = episode.RolloutResources(tasks, sandboxes, Does(script), None, None, RolloutConfig())
        recorder = Recorder(None, None, request, RolloutConfig())
        made = episode.record(request, recorder, episode.play(means, request, recorder), "w")
        score = reward.judge(reward.RewardResources(tasks, sandboxes, grader, RewardConfig()), made)
        return Came(score, made.exit_status, time.monotonic() - started, memory_mb("VmHWM"))


def memory_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def make_workers(folder: Path) -> Workers:
    """The toy repository and the toy of plain files, each in its image, with the limits of a run."""
    world = make_world(folder)
    return Workers(
        world.tasks["unittest"], Apptainer(images=world.sandboxes.images), TASK, Apptainer(images=str(IMAGES))
    )


def cases(many: int) -> Iterator[tuple[str, str, str]]:
    for group, scripts in GROUPS.items():
        for name, script in scripts.items():
            made = REPORT.format(script.strip()) if group == "report" else script
            yield group, name, made.replace("@MANY@", str(many))


def honest(workers: Workers) -> list[Came]:
    right = f"cat > mod.py <<'P'\n{RIGHT}P\n"
    return [workers.play("repository", MEND, ACTION_S), workers.play("files", right)]


def main(words: list[str], many: int) -> int:
    """Print a table; the number of cases that came out wrong."""
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        workers = make_workers(Path(folder))
        bad += sum(not came.is_paid for came in honest(workers))
        start = memory_mb("VmRSS")
        for group, name, script in cases(many):
            if words and not any(word in f"{group}: {name}" for word in words):
                continue
            came = workers.play(group, script)
            grown = max(came.peak_mb - start, 0)
            what = "paid" if came.is_paid else "" if came.is_well else "NO REWARD"
            what += "" if grown < MOST_MB else " MEMORY"
            bad += bool(what)
            told = f"{came.score.outcome} | {what} | {came.seconds:.1f} s | {grown:.0f} MB"
            print(f"| {group} | {name} | {told} | {came.score.detail[:60]!r} |", flush=True)
        bad += sum(not came.is_paid for came in honest(workers))
        print(f"{bad} came out wrong; memory at the end {memory_mb('VmRSS') - start:+.0f} MB", flush=True)
    return bad


if __name__ == "__main__":
    few = "--fewer" in sys.argv
    raise SystemExit(main([w for w in sys.argv[1:] if w != "--fewer"], FEWER if few else MANY) > 0)
