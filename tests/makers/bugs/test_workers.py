"""Processes that try mutants may be killed, as for lack of memory: the command ends, and says so."""

import multiprocessing
import signal
import time

import pytest

from hpc_swe.base.errors import HpcSweError
from hpc_swe.config import config as configuration
from hpc_swe.makers.bugs.workers import TrierWorkers


@pytest.fixture
def workers():
    config = configuration.from_words(["configs/swepdb.toml", "model=none", 'sandbox={type="process"}'])
    return TrierWorkers(4, config, "python-pytest", "/work", 0.5, 30.0, "program")


def test_a_killed_worker_is_an_error_with_a_remedy(workers):
    with pytest.raises(HpcSweError, match="lower --jobs"), workers.pool() as pool:
        pool.submit(signal.raise_signal, signal.SIGKILL).result()


def test_workers_that_are_killed_at_the_end_keep_nobody_waiting(workers):
    """An idle worker may hold the lock that the others need to read that they shall end."""
    with workers.pool() as pool:
        list(pool.map(time.sleep, 4 * [2.0]))
        for each in multiprocessing.active_children()[1:]:
            each.kill()
    assert multiprocessing.active_children() == []
