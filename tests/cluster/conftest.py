"""One test cluster for the whole session; put right before each test that asks for it."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.cluster.bench import Bench
from tests.kit.cluster.cluster import Cluster, StartFailed
from tests.kit.cluster.machine import Unfit, why_not


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """As the last test left it. Skips where the machine cannot have one; fails where packages are missing."""
    if reason := why_not():
        pytest.skip(f"no test cluster: {reason}")
    try:
        started = Cluster.start()
    except Unfit as error:
        pytest.fail(str(error))
    except StartFailed as error:
        pytest.skip(f"no test cluster: it does not start on this machine: {error}")
    with started:
        yield started


@pytest.fixture
def healthy_cluster(cluster: Cluster) -> Cluster:
    """All up and idle, with the settings of its start."""
    cluster.repair()
    return cluster


@pytest.fixture
def bench(healthy_cluster: Cluster) -> Iterator[Callable[..., Bench]]:
    """Makes runs; ends them."""
    made = []

    def make(reward: int, *words: str) -> Bench:
        folder = Path(tempfile.mkdtemp(dir=healthy_cluster.shared))
        made.append(Bench(healthy_cluster, folder, reward, *words))
        return made[-1]

    yield make
    for each in made:
        if each.run.exists():
            each.stop()
