"""Engines that fail are left alone for a while, which doubles when they are asked again and fail again."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from hpc_swe.errors import EngineError, NoAnswer
from hpc_swe.records import Endpoint, EndpointTable, WeightVersion
from hpc_swe.roles.rollout.endpoints import Endpoints
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic
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
def test_an_outage_suspends_as_long_however_many_requests_it_meets(pool: Pool, requests: int) -> None:
    for seconds in (1, 2, 4, 8, 16, 30, 30):
        pool.fail_together(requests)
        pool.clock.now += seconds - 0.01
        assert pool.is_suspended()
        pool.clock.now += 0.02
    assert not pool.is_suspended()


@pytest.mark.parametrize(
    ("noticed_s", "serves_at_s"), [(0.5, 1.0), (5.0, 6.0)], ids=["in the suspension", "after it"]
)
def test_who_notices_an_outage_late_does_not_double_it(
    pool: Pool, noticed_s: float, serves_at_s: float
) -> None:
    """A request whose engine stopped answering is silent for a minute before it counts as failed."""
    late = [pool.begin() for _ in range(8)]
    pool.fail_together(1)
    pool.clock.now = noticed_s
    pool.end(late)
    pool.clock.now = serves_at_s - 0.01
    assert pool.is_suspended()
    pool.clock.now = serves_at_s + 0.01
    assert not pool.is_suspended()


def test_an_answer_ends_what_earlier_failures_count(pool: Pool) -> None:
    pool.fail_together(1)
    pool.clock.now = 1.5
    pool.begin().close()
    pool.fail_together(1)
    pool.clock.now = 2.6
    assert not pool.is_suspended()
