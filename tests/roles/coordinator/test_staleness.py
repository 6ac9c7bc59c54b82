"""No trained token is older than the limit, however the share of groups with signal changes.

Dispatch, decisions and batches are those of a run. An episode takes a time from a distribution with a long
tail, and the weights that it begins with are those of all its tokens. The learner needs 0.4 of the mean
duration of an episode for a step.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hpc_swe.base.records import CoordinatorState
from hpc_swe.config.settings import BatchesConfig, GroupsConfig
from hpc_swe.models.advantages.grpo import Grpo
from hpc_swe.roles.coordinator.batching import batches
from hpc_swe.roles.coordinator.batching.batches import BatchSettings, GroupDecision
from hpc_swe.roles.coordinator.batching.groups import Group, Member
from hpc_swe.roles.coordinator.dispatch import dispatch_end
from hpc_swe.roles.coordinator.modes.training import AHEAD
from tests.kit.made_episodes import scored

STEPS, SLOTS, SIZE, TRAIN_S = 24, 32, 8, 0.4


def jumping(low: float, high: float, every: int = 10) -> Callable[[int], float]:
    """Return a signal rate that alternates between two values."""
    return lambda step: (low, high)[step // every % 2]


RATES: dict[str, Callable[[int], float]] = {
    **{f"{rate:.2f}": (lambda step, rate=rate: rate) for rate in (0.05, 0.1, 0.3, 0.6, 0.9)},
    "0.05 to 0.90 and back": jumping(0.05, 0.9),
    "0.90 to 0.05 and back": jumping(0.9, 0.05),
    "rises from 0.05 to 0.90": lambda step: 0.05 + 0.85 * min(1.0, step / 20),
}


@dataclass
class Loop:
    """A coordinator, workers for SLOTS groups at once, and a learner, by a clock of their own."""

    rate: Callable[[int], float]
    staleness: int
    ages: list[int] = field(default_factory=list)
    """Staleness of the oldest token of each batch."""
    counts: dict[str, int] = field(default_factory=lambda: {"trained": 0, "no_signal": 0, "too_old": 0})
    now: float = 0.0

    def __post_init__(self) -> None:
        limits = GroupsConfig(group_size=2, groups_per_step=SIZE, max_staleness=self.staleness)
        self._settings = BatchSettings(limits, BatchesConfig(), Grpo(), 1)
        self._draw, self._state = random.Random(1), CoordinatorState()
        self._queue: list[int] = []
        self._running: list[tuple[float, int, int]] = []
        """End, number and weights of each group under way."""
        self._trained_at: list[float] = [0.0]
        """When each version of the weights was exported."""
        self._closed: dict[int, Group] = {}
        self._decided: dict[int, GroupDecision] = {}
        self._signals: dict[int, bool] = {}
        """Whether the members of each dispatched group differ."""

    @property
    def step(self) -> int:
        """Return the next batch."""
        return len(self.ages)

    def run(self) -> "Loop":
        """Publish all batches."""
        while self.step < STEPS:
            while self._publish():
                pass
            self._dispatch()
            while self._queue and len(self._running) < SLOTS:
                ends = self.now + max(self._draw.lognormvariate(-0.7, 0.6) for _ in range(8))
                heapq.heappush(self._running, (ends, self._queue.pop(0), self._newest))
            self._pass_time()
        return self

    @property
    def _newest(self) -> int:
        return sum(at <= self.now for at in self._trained_at) - 1

    def _pass_time(self) -> None:
        """Go on to the next end of a group or of a step."""
        later = [at for at in self._trained_at if at > self.now]
        self.now = min([*later, *(group[0] for group in self._running[:1])])
        while self._running and self._running[0][0] <= self.now:
            _, number, version = heapq.heappop(self._running)
            rewards = (1.0, 0.0) if self._signals[number] else (0.0, 0.0)
            results = [scored(r, number, index, step=version) for index, r in enumerate(rewards)]
            members = [Member(r.episode.request, 0.0, r, None, "done") for r in results]
            self._closed[number] = Group(("train", number), members)

    def _publish(self) -> bool:
        if self.step >= self._newest + AHEAD + 1 or self.step == STEPS:
            return False
        made = batches.plan_batch(self._decision, self._state, self.step, SIZE)
        if made is None:
            return False
        for decision in made.decisions.values():
            self.counts[decision.status] += 1
        episodes = [episode for group in made.groups for episode in made.decisions[group].episodes]
        self.ages.append(max(int(episode.staleness.max()) for episode in episodes))
        self._state = made.after
        self._decided.clear()
        self._trained_at.append(max(self.now, self._trained_at[-1]) + TRAIN_S)
        return True

    def _decision(self, number: int) -> GroupDecision | None:
        if number not in self._closed:
            return None
        if number not in self._decided:
            self._decided[number] = batches.decide(self._closed[number], self.step, self._settings)
        return self._decided[number]

    def _dispatch(self) -> None:
        window = min(self._newest + self.staleness, STEPS - 1) + 1 - self.step
        first, rate = self._state.next_group, self._state.signal_rate
        for number in range(first, dispatch_end(first, self._has_signal, window, SIZE, rate)):
            if number not in self._signals:
                self._signals[number] = self._draw.random() < self.rate(self.step)
                self._queue.append(number)

    def _has_signal(self, number: int) -> bool | None:
        decision = self._decision(number)
        return None if decision is None else decision.status == "trained"


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("name", RATES)
def test_no_batch_is_older_than_the_limit_at_any_rate_of_signal(name: str, staleness: int) -> None:
    loop = Loop(RATES[name], staleness).run()
    assert max(loop.ages) <= staleness
    assert len(loop.ages) == STEPS
    assert loop.counts["too_old"] / sum(loop.counts.values()) < 0.3
