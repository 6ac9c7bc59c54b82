"""A whole run on this machine: python -m tests.bench.company RUN --rollout 48 --reward 16.

The coordinator, the rollout workers and the reward workers are the real ones, each a process with its own
lease. What they would wait for is played: the engine is a toy inside each rollout worker, an agent asks it a
few times and edits one file, a grader tosses a coin, and the learner publishes empty weights at once.
"""

import argparse
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.agents.loops.base import Chat, Result
from hpc_swe.agents.sandboxes.base import Sandbox, Sandboxes
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.metrics import Log
from hpc_swe.base.records import ExitStatus, Message, Role, Sampling, Score, Task, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import weights
from hpc_swe.base.store.lease import Lease
from hpc_swe.config.settings import (
    BatchesConfig,
    CoordinatorConfig,
    EvalConfig,
    GroupsConfig,
    LeaseConfig,
    RetentionConfig,
    RewardConfig,
    RolloutConfig,
)
from hpc_swe.models.advantages.grpo import Grpo
from hpc_swe.roles.coordinator.batches import BatchSettings
from hpc_swe.roles.coordinator.dispatch import RequestPlan
from hpc_swe.roles.coordinator.evaluation import Evaluator
from hpc_swe.roles.coordinator.loop import Coordinator
from hpc_swe.roles.coordinator.maintenance import Maintenance
from hpc_swe.roles.coordinator.training import Training
from hpc_swe.roles.reward.worker import RewardResources as RewardMeans
from hpc_swe.roles.reward.worker import worker as reward_worker
from hpc_swe.roles.rollout.endpoints import Endpoints
from hpc_swe.roles.rollout.episode import RolloutResources as RolloutMeans
from hpc_swe.roles.rollout.sampler import Sampler
from hpc_swe.roles.rollout.worker import worker as rollout_worker
from tests.kit import coordinator_kit
from tests.kit.stage import TASK
from tests.kit.toy_engine import ToyEngine
from tests.kit.toy_model import HERMES, make_model

FORK = get_context("fork")
LEASE = LeaseConfig(beat_s=2.0, ttl_s=60.0)
LIMITS = GroupsConfig(group_size=8, groups_per_step=8, max_staleness=1, resample=False)
ROLLOUT, REWARD = RolloutConfig(slots=2), RewardConfig(slots=2)
TURNS = 4
EPISODES_PER_STEP = LIMITS.group_size * LIMITS.groups_per_step
PATIENCE_S = 900.0


class Editor:
    """Asks the policy a few times, edits the task's file, and submits."""

    def __init__(self, episode_s: float) -> None:
        self._episode_s = episode_s

    def solve(self, task: Task, sandbox: Sandbox, chat: Chat) -> Result:
        messages = [Message(role="user", content=task.prompt)]
        for _ in range(TURNS):
            reply = chat(messages)
            messages += [
                Message(role="assistant", content=reply.content),
                Message(role="user", content="go on"),
            ]
            time.sleep(self._episode_s / TURNS * random.uniform(0.5, 1.5))
        sandbox.write("m.py", f"def f(x, y):\n    return {random.random()}\n".encode())
        return Result(ExitStatus.SUBMITTED, messages)


class Coin:
    """A grader."""

    unresolved_reward = 0.0

    def __init__(self, grading_s: float) -> None:
        self._grading_s = grading_s

    def grade(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        time.sleep(self._grading_s * random.uniform(0.5, 1.5))
        solved = random.random() < 0.5
        return Score(outcome="resolved" if solved else "unresolved", reward=float(solved))


def lease(run: RunDir, role: Role) -> Lease:
    return Lease(run, role, f"local-{os.getpid()}", LEASE.beat_s)


def rollout(run: RunDir, builder: TokenBuilder, episode_s: float) -> None:
    engine = ToyEngine(
        builder, ["Look.", "Hm.", "So.", "Done."], version=None
    )  # stamps nothing, as vLLM 0.26
    means = RolloutMeans(
        tasks={TASK.task_id: TASK},
        sandboxes=Process(),
        agent=Editor(episode_s),
        builder=builder,
        sampler=Sampler(engine, Endpoints(run, LIMITS.max_staleness), "secret", 60.0),
        config=ROLLOUT,
    )
    with lease(run, "rollout") as mine:
        rollout_worker(run, mine, means).work()


def reward(run: RunDir, episode_s: float) -> None:
    means = RewardMeans({TASK.task_id: TASK}, Process(), Coin(episode_s / 10), REWARD)
    with lease(run, "reward") as mine:
        reward_worker(run, mine, means).work()


def learner(run: RunDir, steps: int) -> None:
    """And the engines' one supervisor: it serves what was published last."""
    with lease(run, "inference") as mine:
        while not run.finished.exists():
            coordinator_kit.learn(run, steps)
            serving = [weights.newest(run) or WeightVersion()]
            if mine.node.versions != serving:
                mine.publish(state="ready", url="http://toy", versions=serving)
            time.sleep(0.2)


def coordinator(run: RunDir, steps: int) -> None:
    with lease(run, "coordinator") as mine:
        curves = Log(run.metric_log(mine.owner))
        requests = RequestPlan(5, LIMITS.group_size, Sampling(max_tokens=200))
        plan = coordinator_kit.plan_tasks(requests, [TASK.task_id])
        batch_settings = BatchSettings(LIMITS, BatchesConfig(), Grpo(), 1)
        evaluator = Evaluator(run, [], EvalConfig(), 5, curves, 0)
        maintenance = Maintenance(run, RetentionConfig(free_space_floor_gb=0), LEASE, LIMITS.max_losses)
        make = partial(Training, run, plan, batch_settings, steps, evaluator, curves)
        Coordinator(run, maintenance, make, CoordinatorConfig(), {}).work()


def play(run: RunDir, workers: tuple[int, int], steps: int, episode_s: float) -> None:
    """Until the run has finished; a process that fails, or is late, fails the whole."""
    os.umask(0o077)
    run.make()
    with tempfile.TemporaryDirectory() as model:
        builder = TokenBuilder(make_model(Path(model), HERMES))
    parts: list[Callable[[], None]] = [
        partial(coordinator, run, steps),
        partial(learner, run, steps),
        *[partial(rollout, run, builder, episode_s)] * workers[0],
        *[partial(reward, run, episode_s)] * workers[1],
    ]
    children = [FORK.Process(target=part, daemon=True) for part in parts]
    for child in children:
        child.start()
    deadline = time.monotonic() + PATIENCE_S
    while any(child.is_alive() for child in children):
        failed = [child.exitcode for child in children if child.exitcode]
        if failed or time.monotonic() > deadline:
            sys.exit(f"{run.root}: exit codes {failed}, or not finished after {PATIENCE_S:g} s")
        time.sleep(0.2)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    words.add_argument("run", type=Path, help="a folder that is made")
    words.add_argument("--rollout", type=int, default=48, help="rollout workers, of 2 slots each")
    words.add_argument("--reward", type=int, default=16, help="reward workers, of 2 slots each")
    words.add_argument(
        "--steps", type=int, default=5, help=f"optimizer steps of {EPISODES_PER_STEP} episodes"
    )
    words.add_argument("--episode-s", type=float, default=2.0, help="seconds of an episode")
    given = words.parse_args()
    logging.basicConfig(level=logging.ERROR)
    play(RunDir(given.run.absolute()), (given.rollout, given.reward), given.steps, given.episode_s)


if __name__ == "__main__":
    main()
