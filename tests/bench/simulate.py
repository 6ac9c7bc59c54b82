"""A run of thousands of workers in virtual time: python -m tests.bench.simulate --workers 64 4096.

Every worker lists, reaches, rests and is woken as hpc_swe/base/store says: the order in which it reaches for
messages, its tries and its rests are that very code. Only calls are played: each takes its time, and between
a worker's listing and its rename others come first. The coordinator is one process that makes its calls one
after the other. One in four workers grades; nobody dies.
"""

import argparse
import heapq
import json
import math
import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hpc_swe.base.store.spool import TRIES, rotated
from hpc_swe.roles.worker import MAX_SLOWDOWN, Backoff

PAGE = 500  # names that one getdents64 gives
CHANGES_PER_ASK, CHANGES_PER_PUT, CHANGES_PER_BEAT, AHEAD = 2, 3, 2, 4
EMPTY = (
    7  # other folders that the coordinator lists each round: three dead/, scored/claimed, weights/, batches/
)


@dataclass(frozen=True)
class Settings:
    """One run; seconds are virtual."""

    workers: int
    load: float = 1.1
    """Episodes under way for each rollout slot: above 1 requests wait, below 1 workers do."""
    rollout_slots: int = 8
    reward_slots: int = 2
    episode_s: float = 300.0
    grading_s: float = 20.0
    poll_s: float = 0.5
    slowest: float = MAX_SLOWDOWN
    beat_s: float = 30.0
    coordinator_poll_s: float = 1.0
    op_s: float = 0.001
    """One call to the metadata server."""
    sync_s: float = 0.004
    """One fsync."""
    turns: int = 20
    """Of an episode; where the engine stamps no versions, each reads the engine's cell."""
    lasts_s: float = 1200.0
    warm_s: float = 600.0
    """Nothing is counted before."""

    @property
    def rollout(self) -> int:
        return self.workers * 3 // 4

    @property
    def reward(self) -> int:
        return self.workers - self.rollout

    @property
    def leases(self) -> int:
        """An engine serves 256 episodes; the coordinator and the learner's rank 0 beat too."""
        return self.workers + math.ceil(self.rollout * self.rollout_slots / 256) + 2

    @property
    def batch(self) -> int:
        """Episodes of an optimizer step, so that four steps' are under way."""
        return max(8, int(self.load * self.rollout * self.rollout_slots / AHEAD))


class Shelf:
    """ready/ of one spool; messages are numbers, the oldest first."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.claimed = 0

    def take(self, message: int) -> bool:
        place = bisect_left(self.ready, message)
        if place == len(self.ready) or self.ready[place] != message:
            return False
        del self.ready[place]
        self.claimed += 1
        return True


@dataclass
class World:
    """The clock, what lies on disk, and what is counted."""

    settings: Settings
    now: float = 0.0
    requests: Shelf = field(default_factory=Shelf)
    episodes: Shelf = field(default_factory=Shelf)
    scored: list[int] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    """Folder -> most entries seen."""
    busy_s: float = 0.0
    longest_s: float = 0.0
    """Longest round of the coordinator."""
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _number: int = 0

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, event))

    def count(self, what: str, calls: int = 1) -> None:
        if self.now >= self.settings.warm_s:
            self.calls[what] += calls

    def listing(self, what: str, entries: int) -> None:
        self.count(what)
        self.count("page", math.ceil(entries / PAGE))

    def run(self) -> None:
        while self._events and self._events[0][0] < self.settings.lasts_s:
            self.now, _, event = heapq.heappop(self._events)
            event()


class Worker:
    """Plays hpc_swe.roles.worker.Worker: `_iterate`, `_claim`, and the wait between two rounds."""

    def __init__(self, world: World, role: str, results: Callable[[int], None]) -> None:
        settings = world.settings
        rolls = role == "rollout"
        self._world, self._role, self._results = world, role, results
        self._source = world.requests if rolls else world.episodes
        self._slots = settings.rollout_slots if rolls else settings.reward_slots
        self._work_s = settings.episode_s if rolls else settings.grading_s
        self._active, self._wait, self._woken = 0, 0, False
        self._rests = Backoff(settings.poll_s, settings.slowest)
        world.after(random.uniform(0, settings.poll_s), self._round)
        world.after(random.uniform(0, settings.beat_s), self._beat)

    def _beat(self) -> None:
        self._world.count("beat", CHANGES_PER_BEAT)
        self._world.after(self._world.settings.beat_s, self._beat)

    def _round(self) -> None:
        self._wait, self._woken = 0, False
        self._world.listing("orders", 0)
        self._play(self._claims())

    def _play(self, steps: Iterator[float]) -> None:
        """Make the next call; what it finds is what lies there by then."""
        took = next(steps, None)
        if took is not None:
            self._world.after(took, partial(self._play, steps))

    def _claims(self) -> Iterator[float]:
        op_s, found, lost = self._world.settings.op_s, 0, 0
        yield op_s
        free = self._slots - self._active
        if free:
            ready = list(self._source.ready)
            self._world.listing(f"list for {self._role}", len(ready))
            yield op_s
            for message in rotated(ready) if ready else ():
                yield op_s
                if self._source.take(message):
                    self._world.count("claimed")
                    yield op_s  # reads it
                    found += 1
                    self._begin(message)
                else:
                    self._world.count("lost race")
                    lost += 1
                if found == free or lost == TRIES:
                    break
        self._rests.after(self._slots - self._active, found, lost)
        self._rest()

    def _begin(self, message: int) -> None:
        self._active += 1
        self._world.after(self._work_s * random.uniform(0.5, 1.5), partial(self._finish, message))

    def _finish(self, message: int) -> None:
        settings = self._world.settings
        self._world.after(2 * settings.op_s + settings.sync_s, partial(self._results, message))
        self._world.count("put", CHANGES_PER_PUT)
        self._world.count("finish")
        self._source.claimed -= 1
        self._active -= 1
        self._woken = True
        if self._wait:
            self._wait = 0
            self._round()

    def _rest(self) -> None:
        self._wait = self._world._number + 1
        pause = 0.0 if self._woken else random.uniform(0.5, 1.5) * self._rests.pause_s
        self._world.after(pause, partial(self._wake, self._wait))

    def _wake(self, wait: int) -> None:
        if self._wait == wait:
            self._round()


class Coordinator:
    """One call after the other: asks, looks at nine folders, reads results, drops those of a full batch."""

    def __init__(self, world: World) -> None:
        self._world, self._asked, self._read, self._looked = world, 0, 0, -1e9
        world.after(0.0, self._round)

    def _round(self) -> None:
        world, settings = self._world, self._world.settings
        took = sum(self._look()) + sum(self._collect()) + sum(self._ask())
        if world.now >= settings.warm_s:
            world.busy_s += took
            world.longest_s = max(world.longest_s, took)
        world.after(took + settings.coordinator_poll_s * random.uniform(0.5, 1.5), self._round)

    def _look(self) -> Iterator[float]:
        world, settings = self._world, self._world.settings
        entries = {
            "requests/ready": len(world.requests.ready),
            "requests/claimed": world.requests.claimed,
            "episodes/ready": len(world.episodes.ready),
            "episodes/claimed": world.episodes.claimed,
            "scored/ready": len(world.scored),
        }
        world.count("coordinator lists", EMPTY)
        yield settings.op_s * EMPTY
        for name, size in entries.items():
            world.listing("coordinator lists", size)
            if world.now >= settings.warm_s:
                world.most[name] = max(world.most[name], size)
            yield settings.op_s * (1 + math.ceil(size / PAGE))
        if world.now - self._looked >= settings.beat_s:
            self._looked = world.now
            world.listing("coordinator lists", settings.leases)
            world.count("coordinator reads leases", settings.leases)
            yield settings.op_s * settings.leases

    def _collect(self) -> Iterator[float]:
        world, settings = self._world, self._world.settings
        new = len(world.scored) - self._read
        self._read += new
        world.count("coordinator reads results", new)
        yield settings.op_s * new
        while self._read >= settings.batch:
            del world.scored[: settings.batch]
            self._read -= settings.batch
            world.count("drop", settings.batch)
            yield settings.op_s * settings.batch

    def _ask(self) -> Iterator[float]:
        world, settings = self._world, self._world.settings
        under_way = len(world.requests.ready) + world.requests.claimed
        under_way += len(world.episodes.ready) + world.episodes.claimed
        for number in range(int(settings.load * settings.rollout * settings.rollout_slots) - under_way):
            yield (took := 2 * settings.op_s + settings.sync_s)
            world.count("put", CHANGES_PER_ASK)
            world.after((number + 1) * took, partial(world.requests.ready.append, self._asked))
            self._asked += 1


def simulate(settings: Settings, seed: int = 0) -> dict[str, float]:
    """What was counted, as figures."""
    random.seed(seed)
    world = World(settings)
    for _ in range(settings.rollout):
        Worker(world, "rollout", partial(insort, world.episodes.ready))
    for _ in range(settings.reward):
        Worker(world, "reward", world.scored.append)
    Coordinator(world)
    world.run()
    return figures(world)


def figures(world: World) -> dict[str, float]:
    """Per second and per episode."""
    settings, calls = world.settings, world.calls
    seconds = settings.lasts_s - settings.warm_s
    episodes = calls["finish"] / 2
    changes = sum(calls[k] for k in ("put", "claimed", "finish", "drop"))
    lists = {k: calls[k] for k in ("orders", "list for rollout", "list for reward", "coordinator lists")}
    turns = episodes * settings.turns
    reads = calls["claimed"] + calls["coordinator reads results"] + calls["coordinator reads leases"] + turns
    total = changes + calls["beat"] + calls["lost race"] + sum(lists.values()) + reads
    return {
        "workers": settings.workers,
        "load": settings.load,
        "episodes/s": episodes / seconds,
        "slots at work": episodes
        / seconds
        * settings.episode_s
        / (settings.rollout * settings.rollout_slots),
        "changes/episode": changes / episodes,
        "beats/episode": calls["beat"] / episodes,
        "lost races/claim": calls["lost race"] / max(1, calls["claimed"]),
        "orders/s": calls["orders"] / seconds,
        "listings of ready/s": (calls["list for rollout"] + calls["list for reward"]) / seconds,
        "listings/s": sum(lists.values()) / seconds,
        "pages/s": calls["page"] / seconds,
        "opens/s": reads / seconds,
        "calls/s": total / seconds,
        "calls/episode": total / episodes,
        "coordinator busy": world.busy_s / seconds,
        "coordinator's longest round, s": world.longest_s,
        "lease reads/look": settings.leases,
        **{f"most in {name}": float(most) for name, most in world.most.items()},
    }


def table(found: list[dict[str, float]]) -> list[str]:
    """Markdown: a figure a line, a run a column."""
    rows = [[name, *(_number(run[name]) for run in found)] for name in found[0]]
    return ["| " + " | ".join(row) + " |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def main() -> None:
    plain = Settings(workers=64)
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    words.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1024, 4096])
    for name, text in {
        "load": "episodes under way for each rollout slot; below 1 workers are idle",
        "slowest": "longest rest of a worker in poll_s; 1 turns its slowing down off",
        "rollout-slots": "[rollout] slots",
        "reward-slots": "[reward] slots",
        "poll-s": "[rollout] and [reward] poll_s",
        "episode-s": "seconds of an episode",
        "grading-s": "seconds of a grading",
        "op-s": "seconds of one call",
        "sync-s": "seconds of an fsync",
        "lasts-s": "virtual seconds of the run",
        "warm-s": "virtual seconds before counting begins",
    }.items():
        value = getattr(plain, name.replace("-", "_"))
        words.add_argument(f"--{name}", type=type(value), default=value, help=f"{text} (default {value:g})")
    words.add_argument("--json", type=Path, help="also write the figures there")
    given = vars(words.parse_args())
    workers, out = given.pop("workers"), given.pop("json")
    found = [simulate(Settings(workers=count, **given)) for count in workers]
    print(*table(found), sep="\n")
    if out:
        out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
