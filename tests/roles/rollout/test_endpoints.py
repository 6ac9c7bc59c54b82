"""Engines that fail are left alone for a while, which doubles when they are asked again and fail again."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from hpc_swe.base.errors import EngineError, NoAnswer
from hpc_swe.base.records import Endpoint, EndpointTable, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.roles.rollout.endpoints import LOADING_S, PATIENCE_S, Endpoints
from tests.kit.coordinator_kit import Clock


class Pool:
    """The engines of one worker, by a clock that a test moves."""

    def __init__(self, run: RunDir) -> None:
        self.clock = Clock()
        self.endpoints = Endpoints(run, max_lag=0, fresh_s=0.0, monotonic=self.clock)

    def begin(self) -> ExitStack:
        """Begin a request."""
        request = ExitStack()
        request.enter_context(self.endpoints.take("", 0.0))
        return request

    def fail_together(self, requests: int) -> None:
        self.end([self.begin() for _ in range(requests)])

    def end(self, requests: list[ExitStack]) -> None:
        """Let the engine fail while these requests are under way."""
        for request in requests:
            with pytest.raises(NoAnswer), request:
                raise NoAnswer("connection reset")

    def is_suspended(self) -> bool:
        try:
            self.begin()
        except EngineError:
            return True
        return False


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    run = RunDir(tmp_path / "run")
    run.make()
    version = WeightVersion(step=1)
    only = Endpoint(owner="a", url="http://a", versions=[version], updating=False)
    atomic.put(run.endpoints, EndpointTable(beat=1, endpoints=[only], newest=version))
    return Pool(run)


@pytest.mark.parametrize("requests", [1, 8])
def test_an_outage_suspends_as_long_however_many_requests_it_meets(pool, requests):
    for seconds in (1, 2, 4, 8, 16, 30, 30):
        pool.fail_together(requests)
        pool.clock.now += seconds - 0.01
        assert pool.is_suspended()
        pool.clock.now += 0.02
    assert not pool.is_suspended()


@pytest.mark.parametrize(
    ("noticed_s", "serves_at_s"), [(0.5, 1.0), (5.0, 6.0)], ids=["in the suspension", "after it"]
)
def test_who_notices_an_outage_late_does_not_double_it(pool, noticed_s, serves_at_s):
    """A request whose engine stopped answering is silent for a minute before it counts as failed."""
    late = [pool.begin() for _ in range(8)]
    pool.fail_together(1)
    pool.clock.now = noticed_s
    pool.end(late)
    pool.clock.now = serves_at_s - 0.01
    assert pool.is_suspended()
    pool.clock.now = serves_at_s + 0.01
    assert not pool.is_suspended()


def test_an_answer_ends_what_earlier_failures_count(pool):
    pool.fail_together(1)
    pool.clock.now = 1.5
    pool.begin().close()
    pool.fail_together(1)
    pool.clock.now = 2.6
    assert not pool.is_suspended()


OLD, NEW = WeightVersion(step=1), WeightVersion(incarnation=1, step=2)
FARTHER = WeightVersion(step=3)
"""Of the learner before the one that made NEW, which went back."""


class Ticking(Clock):
    """Pass a tenth of a second with each look, and load the new weights after so many."""

    def __init__(self, run: RunDir, loaded_at_s: float, listed: dict[str, list[WeightVersion]]) -> None:
        super().__init__()
        self._run, self._loaded_at_s, self._listed = run, loaded_at_s, listed
        self._list(listed)

    def __call__(self) -> float:
        self.now += 0.1
        if self.now >= self._loaded_at_s:
            self._list(dict.fromkeys(self._listed, [NEW]))
        return self.now

    def _list(self, listed: dict[str, list[WeightVersion]]) -> None:
        engines = [
            Endpoint(owner=name, url=f"http://{name}", versions=versions, updating=len(versions) > 1)
            for name, versions in listed.items()
        ]
        atomic.put(self._run.endpoints, EndpointTable(beat=1, endpoints=engines, newest=NEW))


@pytest.mark.parametrize(
    ("listed", "prefer", "loaded_at_s", "begins_with"),
    [
        ({"a": [OLD]}, "", 5.0, [NEW]),
        ({"a": [OLD, NEW]}, "", 5.0, [NEW]),
        ({"a": [OLD, NEW]}, "", 3 * PATIENCE_S, [NEW]),
        ({"a": [NEW]}, "", 1e9, [NEW]),
        ({"a": [OLD, NEW]}, "a", 5.0, [OLD, NEW]),
        ({"a": [OLD]}, "", 1e9, [OLD]),
        ({"a": [OLD, NEW], "b": [OLD]}, "", 1e9, [OLD]),
        ({"a": [OLD], "b": [NEW], "c": [OLD]}, "", 1e9, [NEW]),
    ],
    ids=[
        "not begun",
        "loading",
        "loading for long",
        "loaded",
        "a later turn",
        "refused for good",
        "rather one that answers",
        "rather one that is not behind",
    ],
)
def test_a_new_episode_waits_a_while_for_the_newest_weights(
    tmp_path, listed, prefer, loaded_at_s, begins_with
):
    run = RunDir(tmp_path / "run")
    run.make()
    clock = Ticking(run, loaded_at_s, listed)
    endpoints = Endpoints(run, max_lag=2, fresh_s=0.0, monotonic=clock)
    with endpoints.take(prefer, 600.0) as endpoint:
        assert endpoint.versions == begins_with
    assert clock.now < LOADING_S + PATIENCE_S
    over = max(clock.now, PATIENCE_S)  # the first may have drawn an engine that is not behind
    with endpoints.take(prefer, 600.0) as endpoint:
        assert endpoint.versions == begins_with
    assert clock.now < over + 2.0, (
        "an engine that stays behind costs a wait for each version, not for each episode"
    )


def test_no_episode_waits_for_weights_that_a_learner_makes_again(tmp_path):
    run = RunDir(tmp_path / "run")
    run.make()
    clock = Ticking(run, 1e9, {"a": [FARTHER]})
    with Endpoints(run, max_lag=2, fresh_s=0.0, monotonic=clock).take("", 600.0) as endpoint:
        assert endpoint.versions == [FARTHER]
    assert clock.now < PATIENCE_S / 2


@pytest.mark.parametrize(("workers", "slots"), [(1, 8), (40, 1)])
def test_engines_that_load_weights_later_get_their_share(tmp_path, workers, slots):
    """Otherwise the first that has loaded them would get all new episodes, with all their turns."""
    run = RunDir(tmp_path / "run")
    run.make()
    taken = []
    for _ in range(workers):
        clock = Ticking(run, 6.0, {"a": [NEW], "b": [OLD, NEW]})
        endpoints = Endpoints(run, max_lag=2, fresh_s=0.0, monotonic=clock)
        with ExitStack() as requests:
            taken += [requests.enter_context(endpoints.take("", 600.0)).owner for _ in range(slots)]
    assert len(taken) / 5 <= taken.count("b") <= len(taken) * 4 / 5


def test_a_wait_shorter_than_its_patience_ends_with_an_engine(tmp_path):
    run = RunDir(tmp_path / "run")
    run.make()
    for wait_s in (0.0, 0.3, 1.0, 3.0):
        endpoints = Endpoints(run, max_lag=2, fresh_s=0.0, monotonic=Ticking(run, 1e9, {"a": [OLD]}))
        with endpoints.take("", wait_s) as endpoint:
            assert endpoint.versions == [OLD]
