"""The supervisor over the real vLLM: what survives whose death."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest

from hpc_swe.base.records import WeightVersion
from tests.kit.engine_kit import (
    CPU,
    TOKEN,
    await_node,
    is_serving,
    make_model,
    make_run,
    processes,
    publish,
    supervise,
)
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
START_S = 900.0
TEXT = list(range(40, 60))


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def shared_memory(mark: str) -> set[Path]:
    """Named semaphores and shared memory that the engine's processes have open."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in processes(mark))
    return {Path(word) for word in maps.split() if word.startswith("/dev/shm/")}


@pytest.fixture
def scratch() -> Iterator[str]:
    with TemporaryDirectory(prefix="t") as folder:  # short, for sockets
        yield folder


def test_an_engine_that_dies_comes_back_and_dies_with_its_supervisor(tmp_path, scratch):
    mark = f"TEST_MARK={tmp_path}"
    # A tied head, of which vLLM keeps a packed copy on a CPU: what a swap leaves must be what a start gives.
    # The model that the run starts from stores it, too; versions, which a learner writes, do not.
    run = make_run(tmp_path / "run")
    models = [make_model(tmp_path / str(n), n, tied=True, stores_head=n == 0) for n in (0, 1)]
    engine = msgspec.structs.replace(CPU, environ={"TEST_MARK": str(tmp_path)})
    process = supervise(run, engine, models[0], scratch=scratch)
    try:
        first = await_node(run, is_serving(WeightVersion()), START_S)
        scores = engine.score(first.url, TOKEN, TEXT)
        version = WeightVersion(step=1, incarnation=1)
        publish(run, models[1], version)
        url = await_node(run, is_serving(version)).url
        new = engine.score(url, TOKEN, TEXT)
        assert np.abs(np.asarray(new) - scores).max() > 0.5

        [core] = [pid for pid in processes(mark) if "EngineCore" in command_line(pid)]
        os.kill(core, signal.SIGKILL)
        cell = await_node(run, lambda node: node.state == "starting")
        assert (cell.url, cell.versions) == ("", [])
        again = await_node(run, is_serving(version), START_S)
        assert again.owner == first.owner
        assert engine.score(again.url, TOKEN, TEXT) == pytest.approx(new, abs=1e-4)

        shared = shared_memory(mark)
        assert shared
        process.kill()
        until(lambda: not processes(mark), "the end of all processes", START_S)
        assert not [path for path in shared if path.exists()]
        assert os.listdir(scratch) == []
    finally:
        process.kill()
        process.communicate()


def test_vllm_without_its_guard_and_supervisor_ends_too(tmp_path, scratch):
    mark = f"TEST_MARK={tmp_path}"
    run, model = make_run(tmp_path / "run"), make_model(tmp_path / "model", 0)
    engine = msgspec.structs.replace(CPU, environ={"TEST_MARK": str(tmp_path)})
    process = supervise(run, engine, model, scratch=scratch)
    try:
        await_node(run, is_serving(WeightVersion()), START_S)
        [guard] = [pid for pid in processes(mark) if "inference.guard" in command_line(pid)]
        process.kill()
        os.kill(guard, signal.SIGKILL)
        until(lambda: not processes(mark), "the end of all processes", START_S)
    finally:
        process.kill()
        process.communicate()
