"""A run folder as a coordinator leaves it, made without one: episodes of several turns, and curves.

    python -m tests.kit.reported_run FOLDER --episodes 10000

makes a large one, of which the report's seconds and bytes are measured.
"""

import math
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.base import records
from hpc_swe.base.metrics import Log
from hpc_swe.base.records import (
    Episode,
    ExitStatus,
    Message,
    RolloutRequest,
    RunManifest,
    Sampling,
    Score,
    ScoredEpisode,
    Timing,
    ToolCall,
    Turn,
    VersionSpan,
    WeightVersion,
)
from hpc_swe.base.rundir import PROTOCOL, RunDir
from hpc_swe.base.store import atomic
from hpc_swe.base.store.parquet import evals
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.config import config as configuration
from hpc_swe.launch.create import encoded
from hpc_swe.roles.coordinator import archive
from tests.kit.checkout import ROOT
from tests.kit.made_episodes import turn
from tests.kit.toy_model import HERMES, make_model

GROUP = 4
MOST_READ = 1000  # characters of an observation that become tokens
SYSTEM, QUESTION = "Repair the program.", "The test of f in m.py fails. Mend it."
SEEN = "def f(x, y):\n    return x - y\n"
PATCH = "--- a/m.py\n+++ b/m.py\n@@ -1,2 +1,2 @@\n def f(x, y):\n-    return x - y\n+    return x + y\n"


@dataclass(frozen=True)
class Words:
    """What an episode's policy, tools and tests say."""

    said: str = "I look at the file, d\u00f6ner \U0001f40d."
    tool: str = "view"
    arguments: str = '{"path": "m.py", "lines": 2}'
    seen: str = SEEN
    test: str = "test_m.py::test_f"
    task: str = "bugs-train-7"
    patch: str = PATCH


class RunMaker:
    """Makes one run, step by step."""

    def __init__(self, root: Path, mode: str = "grpo") -> None:
        self.run = RunDir(root)
        self.run.make()
        model = make_model(root.with_name(f"{root.name}-model"), HERMES)
        words = [
            f'model="{model}"',
            f"groups.group_size={GROUP}",
            "groups.resample=true",
            f'mode="{mode}"',
            "steps=40",
        ]
        self.config = configuration.read(ROOT / "configs/demo.toml", overrides=words)
        atomic.write(self.run.config, encoded(configuration.dump(self.config)))
        manifest = RunManifest(
            protocol=PROTOCOL,
            run_id="r",
            commit="c",
            model_sha256="",
            config_sha256="",
            folder=str(ROOT),
            environment={},
        )
        atomic.put(self.run.manifest, manifest)
        self.builder = TokenBuilder(model)

    def episode(
        self,
        group: int,
        index: int,
        reward: float = 0.0,
        words: Words | None = None,
        step: int = 0,
        turns: int = 3,
    ) -> ScoredEpisode:
        """Turns with calls, each of which answers the one before; two versions sampled the second turn."""
        words, split = words or Words(), "train"
        request = RolloutRequest(
            split=split, group_id=group, index=index, task_id=words.task, seed=7, sampling=Sampling()
        )
        draw = random.Random(f"{group} {index}")
        messages = [Message(role="system", content=SYSTEM), Message(role="user", content=QUESTION)]
        made: list[Turn] = []
        new, last = list(messages), -1
        for number in range(turns):
            call = ToolCall(name=words.tool, arguments=words.arguments)
            answer = Message(role="assistant", content=words.said, tool_calls=[call])
            appended = self.builder.extend(last, new) if made else self.builder.start(new)
            ids = self.builder.tokens.encode(words.said + words.arguments) + [self.builder.end_id]
            made.append(_turn(number, appended, ids, draw, step))
            new, last = [Message(role="tool", content=words.seen[:MOST_READ])], ids[-1]
            messages += [answer, Message(role="tool", content=words.seen)]
        episode = Episode(
            request=request,
            turns=made,
            messages=messages,
            exit_status=ExitStatus.SUBMITTED,
            submission=words.patch,
            timing=Timing(sandbox_s=0.5, engine_s=2.0, tools_s=0.3, total_s=3.1),
            worker="rollout-1-00000000",
            counts={"chains": 1},
            main=0,
        )
        passed, failed = ([words.test], []) if reward else ([], [words.test])
        score = Score(
            outcome="resolved" if reward else "unresolved",
            reward=reward,
            passed=passed,
            failed=failed,
            detail=words.seen,
            seconds=0.5,
        )
        return ScoredEpisode(episode=episode, score=score)

    def step(
        self, step: int, groups: int = 2, words: Words | None = None, turns: int = 3
    ) -> list[ScoredEpisode]:
        """Archive a step's episodes; the last group has no signal."""
        first = step * groups
        found = [
            self.episode(group, index, float(index == 1 and group < first + groups - 1), words, step, turns)
            for group in range(first, first + groups)
            for index in range(GROUP)
        ]
        archive.write(self.run.archive(step), found, range(first, first + groups - 1))
        return found

    def evaluation(self, label: str, tasks: int = 3, words: Words | None = None) -> None:
        """One decoding; every second task is solved, and one episode never came back."""
        rows = []
        for task in range(tasks):
            scored = self.episode(task, 0, float(task % 2 == 0), words)
            rows.append(
                Attempt(
                    task_id=f"held-out-{task}",
                    index=0,
                    sampling="greedy",
                    sample=0,
                    outcome=scored.score.outcome,
                    reward=scored.score.reward,
                    exit_status="submitted",
                    turns=len(scored.episode.turns),
                    sampled_tokens=40,
                    messages=scored.episode.messages,
                    record=msgspec.msgpack.encode(scored),
                )
            )
        lost = Attempt(
            task_id="lost", index=0, sampling="greedy", sample=0, outcome="infra_error", reward=None
        )
        evals.write(self.run.eval_table(label), [*rows, lost])

    def curves(self, steps: int) -> None:
        """Some of every chart, and evaluations with their intervals."""
        log = Log(self.run.metric_log("coordinator-1"))
        for step in range(steps):
            rate = 1 / (1 + math.exp(3 - step / 4))
            values = {"reward/mean": rate, "reward/trained_mean": rate * 0.9, "solve/train": rate}
            values |= {"groups/signal_rate": 0.4, "staleness/mean": 0.6, "staleness/max": 1.0}
            values |= {
                "episodes/tokens": 90.0 - step,
                "episodes/turns": 3.0,
                "gap/mean": 0.001,
                "gap/p99": 0.02,
            }
            values |= {"policy/loss": -rate / 10, "policy/kl": rate / 100, "policy/entropy": 1 - rate}
            values |= {
                "policy/grad_norm": 0.2,
                "policy/lr": 6e-4,
                "exit/submitted": 0.9,
                "rate/sampled_tokens": 800.0,
            }
            log.write(step, values)
            if step % 8 == 0:
                ends = {"solve/eval_low/greedy": rate - 0.1, "solve/eval_high/greedy": rate + 0.1}
                log.write(step, {"solve/eval/greedy": rate, **ends, "solve/eval_any/greedy": rate + 0.05})


def _turn(number: int, appended: list[int], ids: list[int], draw: random.Random, step: int) -> Turn:
    older, newer = WeightVersion(step=max(0, step - 1)), WeightVersion(step=step)
    middle = len(ids) // 2 if number == 1 else 0
    spans = [VersionSpan(start=0, end=middle, oldest=older, newest=older)] if middle else []
    return msgspec.structs.replace(
        turn(number - 1 if number else None, appended, ids, step),
        logprobs=records.floats([-(draw.expovariate(2.0) ** 2) for _ in ids]),
        spans=[*spans, VersionSpan(start=middle, end=len(ids), oldest=newer, newest=newer)],
    )
