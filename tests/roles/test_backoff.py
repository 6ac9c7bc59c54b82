"""The pauses of workers, and a contest of a thousand of them for one spool, in virtual time."""

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest

from hpc_swe.base.store.spool import TRIES, rotated
from hpc_swe.roles.worker import FIRST_PAUSE_S, MAX_SLOWDOWN, Backoff

WORKERS, SLOTS, POLL_S, EPISODE_S, CALL_S, PUT_S = 768, 8, 0.5, 300.0, 0.001, 0.006


def pauses(*rounds: tuple[int, int, int]) -> list[float]:
    worker, found = Backoff(POLL_S), []
    for free, claimed, lost in rounds:
        worker.after(free, claimed, lost)
        found.append(worker.pause_s)
    return found


def test_a_worker_that_finds_nothing_rests_twice_as_long_each_time():
    assert pauses(*[(1, 0, 0)] * 5) == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_worker_without_a_free_slot_only_looks_for_orders():
    assert pauses((0, 3, 0), (0, 0, 0), (1, 0, 0)) == [MAX_SLOWDOWN * 0.5, MAX_SLOWDOWN * 0.5, 0.1]


def test_lost_races_slow_a_worker_down_and_claims_speed_it_up_again():
    slowed = pauses(*[(1, 0, 3)] * 8)
    assert (slowed[0], slowed[-1]) == (0.2, MAX_SLOWDOWN * 0.5)
    assert pauses(*[(1, 0, 3)] * 8, *[(1, 1, 0)] * 8)[-1] == FIRST_PAUSE_S


@dataclass
class Contest:
    """What lies in the spool, and what is counted; generators yield the seconds until they go on."""

    load: float
    """Episodes under way for each slot: above 1 messages wait, below 1 workers do."""
    ready: dict[int, None] = field(default_factory=dict)
    active: int = 0
    claimed: int = 0
    lost: int = 0
    _waiting: list[tuple[float, int, Iterator[float]]] = field(default_factory=list)
    _turns: Iterator[int] = field(default_factory=count)

    def play(self, actor: Iterator[float], now: float) -> None:
        heapq.heappush(self._waiting, (now + next(actor), next(self._turns), actor))

    def run(self, until_s: float) -> None:
        while self._waiting[0][0] < until_s:
            now, _, actor = heapq.heappop(self._waiting)
            self.play(actor, now)

    def coordinate(self) -> Iterator[float]:
        for message in count():
            if len(self.ready) + self.active < self.load * WORKERS * SLOTS:
                self.ready[message] = None
                yield PUT_S
            else:
                yield random.uniform(0.5, 1.5)

    def work(self) -> Iterator[float]:
        backoff, ends, now = Backoff(POLL_S), list[float](), random.uniform(0, POLL_S)
        yield now
        while True:
            going = [end for end in ends if end > now]
            self.active -= len(ends) - len(going)
            ends, found, lost = going, 0, 0
            free = SLOTS - len(ends)
            listed, spent = rotated(list(self.ready)) if free else [], CALL_S
            yield CALL_S
            for message in listed:
                if message in self.ready:
                    del self.ready[message]
                    ends.append(now + EPISODE_S * random.uniform(0.5, 1.5))
                    found += 1
                else:
                    lost += 1
                spent += CALL_S
                yield CALL_S
                if found == free or lost == TRIES:
                    break
            self.active, self.claimed, self.lost = self.active + found, self.claimed + found, self.lost + lost
            backoff.after(free - found, found, lost)
            pause_s = random.uniform(0.5, 1.5) * backoff.pause_s
            now += spent + pause_s
            yield pause_s


@pytest.mark.slow
@pytest.mark.parametrize(("load", "most"), [(1.1, 0.01), (0.5, 1.0)], ids=["messages wait", "workers wait"])
def test_a_thousand_workers_win_most_races_and_keep_their_slots_busy(load, most):
    random.seed(0)
    contest = Contest(load)
    contest.play(contest.coordinate(), 0.0)
    for _ in range(WORKERS):
        contest.play(contest.work(), 0.0)
    contest.run(300.0)
    contest.claimed = contest.lost = 0
    contest.run(500.0)
    assert contest.lost < most * contest.claimed
    assert contest.active > 0.9 * min(load, 1.0) * WORKERS * SLOTS
