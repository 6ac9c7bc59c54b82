"""Starts the ranks of one job as real processes over gloo, as those of one node or of several."""

import atexit
import functools
import json
import multiprocessing
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

from hpc_swe.cluster.processes import MEETING, is_stopped
from tests.kit.checkout import ROOT

EVERYWHERE = {"OMP_NUM_THREADS": "1"}
RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload([f"{__package__}.preloaded"])


@functools.cache
def _import_once() -> None:
    """Start the process that ranks are forked from, with the environment that imports need."""
    before = dict(os.environ)
    os.environ.update(EVERYWHERE, PYTHONPATH=str(ROOT))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def launch(size: int, program: str | Path, *arguments: str, timeout_s: float = 900.0) -> list[str]:
    children = start(size, program, *arguments)
    try:
        outputs = [child.communicate(timeout=timeout_s)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    ends = "".join(f"\n--- rank {rank}:\n{output[-5000:]}" for rank, output in enumerate(outputs))
    assert all(child.returncode == 0 for child in children), ends
    return outputs


class Rank:
    """One rank: a process forked from one that has imported Megatron, which takes 4 s of CPU."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        handle, name = tempfile.mkstemp(prefix="rank-")
        os.close(handle)
        self._output = Path(name)
        atexit.register(self._output.unlink, missing_ok=True)
        _import_once()
        self._process = RANKS.Process(target=_become, args=(command, environment, name))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def is_stopped(self) -> bool:
        return self._process.pid is not None and is_stopped(self._process.pid)

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        if self._process.pid is not None and self.poll() is None:
            os.kill(self._process.pid, number)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """What it wrote until its end."""
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self._output.read_text(errors="replace"), None


def _become(command: Sequence[str], environment: dict[str, str], output: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = list(command)
    run = runpy.run_path if command[0].endswith(".py") else runpy.run_module
    run(command[0], run_name="__main__")


def start(size: int, program: str | Path, *arguments: object, one_node: bool = True) -> list[Rank]:
    """Start a module beside this one, or a file, once for each rank."""
    command = [f"{__package__}.{program}" if isinstance(program, str) else program, *arguments]
    meeting = _of_one_node(size) if one_node else _of_several_nodes()
    children = []
    for rank in range(size):
        place = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | {"WORLD_SIZE": str(size)}
        children.append(Rank([*map(str, command)], EVERYWHERE | os.environ | meeting | place))
    return children


def _of_one_node(size: int) -> dict[str, str]:
    place = tempfile.mkdtemp(prefix="meeting-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return {MEETING: place, "LOCAL_WORLD_SIZE": str(size)}


def _of_several_nodes() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def run_cases(
    size: int, cases: Sequence[dict], folder: Path, timeout_s: float = 900.0
) -> dict[str, list[dict]]:
    """Run cases one after another in one job; answers of all ranks by case name."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / f"spec{size}.json"
    spec.write_text(json.dumps([case | {"out": str(folder / case["name"])} for case in cases]))
    outputs = launch(size, "worker", str(spec), timeout_s=timeout_s)
    assert not any("common state dict differs" in each for each in outputs), "ranks differ in a checkpoint"
    return read_answers(size, cases, folder)


def read_answers(size: int, cases: Sequence[dict], folder: Path) -> dict[str, list[dict]]:
    """Answers of all ranks by case name, of cases that all ranks have ended."""
    names, ranks = [case["name"] for case in cases], range(size)
    files = {name: [folder / name / f"rank{rank}.json" for rank in ranks] for name in names}
    return {
        name: [json.loads(each.read_text()) for each in every]
        for name, every in files.items()
        if all(each.exists() for each in every)
    }
