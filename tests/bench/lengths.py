"""Does load bias what is trained? python -m tests.bench.lengths --steps 12

The coordinator's own parts (Training, Housekeeper, spools, leases, batches) on a run folder, in virtual time.
Workers, grader, engine and learner are played: an episode takes as long as its seed says, samples a token in
ten seconds, and is resolved or not at random. Compared are the mean lengths of the episodes that were asked
for, that finished, and that were trained. The clock of a group is another rule for stragglers: one clock for
the whole group, from its dispatch on.
"""

import argparse
import math
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from statistics import fmean

import msgspec

from hpc_swe.metrics import Log
from hpc_swe.plugins.advantages.grpo import Grpo
from hpc_swe.records import (
    BatchManifest,
    Node,
    RolloutRequest,
    Sampling,
    ScoredEpisode,
    VersionSpan,
    WeightVersion,
    floats,
    ids,
)
from hpc_swe.roles.coordinator import archive, batches
from hpc_swe.roles.coordinator.batches import BatchSettings
from hpc_swe.roles.coordinator.dispatch import RequestPlan
from hpc_swe.roles.coordinator.evaluation import Evaluator
from hpc_swe.roles.coordinator.groups import Key, Ledger
from hpc_swe.roles.coordinator.samples import sampled_tokens
from hpc_swe.roles.coordinator.training import Training
from hpc_swe.rundir import RunDir
from hpc_swe.settings import BatchesConfig, EvalConfig, GroupsConfig
from hpc_swe.store import atomic, folders, weights
from hpc_swe.store.spool import Claim, Spool
from tests.kit import coordinator_kit as played

BEAT_S, STEP_S, TOKEN_S = 30.0, 120.0, 10.0
LONGEST_S = 5 * 86_400.0
SPREAD = 0.8  # of the logarithm of a length: the longest of 256 is about six times the mean
OWNER, ENGINE = "rollout-1-0000beef", "inference-1-0000cafe"


@dataclass(frozen=True)
class Load:
    """What the run meets; seconds are virtual."""

    name: str
    slots: int = 64
    workers_from_s: float = 0.0
    engine_away: tuple[float, float] = (0.0, 0.0)


LOADS = (
    Load("512 slots, so nothing waits", slots=512),
    Load("64 slots"),
    Load("64 slots, whose jobs wait for 2 h", workers_from_s=7200.0),
    Load("64 slots, no engine in hours 2 to 5", engine_away=(7200.0, 18000.0)),
)
Rule = tuple[str, float]
"""Whose clock, and straggler_s."""
RULES: tuple[Rule, ...] = (("group", 7200.0), ("member", 7200.0), ("member", GroupsConfig().straggler_s))


class GroupClock(Ledger):
    """The other rule."""

    now = 0.0

    def __init__(self, max_attempts: int) -> None:
        super().__init__(max_attempts)
        self._opened: dict[Key, float] = {}

    def close_stragglers(self, worked_s: Mapping[str, float], limit_s: float) -> None:
        for key, group in self.groups.items():
            waited = GroupClock.now - self._opened.setdefault(key, GroupClock.now)
            group.straggled |= group.is_open and waited > limit_s


def length_s(request: RolloutRequest, mean_s: float) -> float:
    """Log-normal, and the same in every run."""
    return mean_s * math.exp(random.Random(request.seed).gauss(-(SPREAD**2) / 2, SPREAD))


@dataclass
class Crew:
    """All rollout and reward workers in one, and the engine."""

    run: RunDir
    load: Load
    mean_s: float
    now: float = 0.0
    served_s: float = 0.0
    """Seconds for which an engine served."""
    beat: int = 0
    active: list[tuple[float, str, float, Claim[RolloutRequest]]] = field(default_factory=list)
    """When each ends, its name, and when it began, in `served_s`."""

    def work(self, now: float) -> None:
        """Go on to this time."""
        away_from, away_to = self.load.engine_away
        is_served = not away_from <= now < away_to
        self.served_s += (now - self.now) * is_served
        self.now = now
        while self.active and self.active[0][0] <= self.served_s:
            self._finish(heappop(self.active)[-1])
        if now >= self.load.workers_from_s:
            if is_served:
                self._claim()
            self._show(OWNER, is_served=True)
        self._show(ENGINE, is_served=is_served)
        self.beat += 1

    def _claim(self) -> None:
        requests = Spool(self.run.requests, RolloutRequest)
        for claim in islice(requests.claims(OWNER), self.load.slots - len(self.active)):
            ends = self.served_s + length_s(claim.message, self.mean_s)
            heappush(self.active, (ends, claim.name, self.served_s, claim))

    def _finish(self, claim: Claim[RolloutRequest]) -> None:
        request = claim.message
        scored = played.result(request, float(random.Random(request.seed + 1).random() < 0.5))
        tokens = max(1, round(length_s(request, self.mean_s) / TOKEN_S))
        (turn,) = scored.episode.turns
        span = VersionSpan(start=0, end=tokens, oldest=turn.spans[0].oldest, newest=turn.spans[0].newest)
        turn = msgspec.structs.replace(
            turn,
            completion_ids=ids([7] * tokens),
            logprobs=floats([-1.0] * tokens),
            spans=[span],
            routing=b"",  # the played one is that of fewer tokens
        )
        episode = msgspec.structs.replace(scored.episode, turns=[turn])
        done = msgspec.structs.replace(scored, episode=episode)
        Spool(self.run.scored, ScoredEpisode).put(claim.name, done)
        claim.finish()

    def _show(self, owner: str, *, is_served: bool) -> None:
        newest = weights.newest(self.run) or WeightVersion()
        node = Node(
            owner=owner, role="inference", beat=self.beat, host="h", pid=1, state="ready", url="http://e"
        )
        if owner == OWNER:
            node = msgspec.structs.replace(
                node,
                role="rollout",
                claims=[name for _, name, _, _ in self.active],
                worked_s=[self.served_s - began for _, _, began, _ in self.active],
            )
        if is_served:
            atomic.put(self.run.node(owner), msgspec.structs.replace(node, versions=[newest]), durable=False)
        else:
            self.run.node(owner).unlink(missing_ok=True)


def play(run: RunDir, load: Load, rule: Rule, steps: int, mean_s: float) -> RequestPlan:
    """A whole run."""
    run.make()
    limits = GroupsConfig(group_size=8, groups_per_step=32, resample=False, straggler_s=rule[1])
    requests = RequestPlan(7, limits.group_size, Sampling())
    plan = played.plan_tasks(requests, [f"task-{n}" for n in range(512)])
    time, crew, log = played.Clock(), Crew(run, load, mean_s), Log(run.metric_log("coordinator"))
    batch_settings = BatchSettings(limits, BatchesConfig(), Grpo(), 1)
    mode = Training(run, plan, batch_settings, steps, Evaluator(run, [], EvalConfig(), 5, log, 0), log)
    if rule[0] == "group":
        mode._ledger = mode._collector.ledger = GroupClock(limits.max_attempts)
    maintenance = played.make_maintenance(run, time, beat_s=BEAT_S, ttl_s=4 * BEAT_S)
    trains_until = math.inf
    while len(batches.published_steps(run)) < steps:
        assert time.now < LONGEST_S, "the simulated run does not end"
        time.now += BEAT_S
        GroupClock.now = time.now
        crew.work(time.now)
        mode.iterate(maintenance.snapshot())
        step = (weights.newest(run) or WeightVersion()).step
        if run.batch(step).exists():
            trains_until = min(trains_until, time.now + STEP_S)
        if time.now >= trains_until:
            played.export(run, WeightVersion(step=step + 1))
            trains_until = math.inf
    return requests


def figures(run: RunDir, requests: RequestPlan, mean_s: float) -> dict[str, float]:
    """Mean lengths in minutes, and how many of the members of closed groups have no result."""
    manifests = [folders.manifest(run.batch(step), BatchManifest) for step in batches.published_steps(run)]
    closed = [group for manifest in manifests for group in (*manifest.groups, *manifest.closed)]
    trained = {group for manifest in manifests for group in manifest.groups}
    asked = [length_s(request, mean_s) for group in closed for request in requests.group(group, "")]
    found = [s.episode for step in batches.published_steps(run) for s in archive.read(run.archive(step))]
    finished = [(sampled_tokens(e) * TOKEN_S, e.request.group_id in trained) for e in found]
    return {
        "asked for": fmean(asked) / 60,
        "finished": fmean(s for s, _ in finished) / 60,
        "trained": fmean(s for s, is_trained in finished if is_trained) / 60,
        "without result": 1 - len(finished) / len(asked),
        "groups dropped": 1 - len(trained) / len(closed),
    }


def row(load: Load, rule: Rule, steps: int, mean_s: float) -> dict[str, float]:
    """Play it in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="hpc_swe.") as name:
        run = RunDir(Path(name) / "run")
        return figures(run, play(run, load, rule, steps, mean_s), mean_s)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    words.add_argument("--steps", type=int, default=12, help="optimizer steps of 32 groups of 8")
    words.add_argument("--mean-s", type=float, default=1200.0, help="mean seconds of an episode")
    given = words.parse_args()
    print("| clock of | load | asked for, min | finished | trained | without result | groups dropped |")
    print("|---|---|---|---|---|---|---|")
    for clock, limit_s in RULES:
        for load in LOADS:
            found = row(load, (clock, limit_s), given.steps, given.mean_s)
            minutes = [f"{found[name]:.2f}" for name in ("asked for", "finished", "trained")]
            shares = [f"{found[name]:.1%}" for name in ("without result", "groups dropped")]
            print(
                "|",
                " | ".join([f"a {clock}, {limit_s / 3600:g} h", load.name, *minutes, *shares]),
                "|",
                flush=True,
            )


if __name__ == "__main__":
    main()
