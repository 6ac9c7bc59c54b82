"""Numerical libraries start as many threads in a sandbox as the configuration says, whatever the node has."""

import os
import sys
from pathlib import Path

import numpy
import pytest

from hpc_swe.agents.sandboxes._session import Limits
from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.base import Sandboxes
from hpc_swe.agents.sandboxes.process import Process
from tests.kit.constants import varied

PACKAGES = "/opt/packages"
COUNT = f"""
import os, sys
sys.path += [{PACKAGES!r}]
import numpy
numpy.ones((600, 600)) @ numpy.ones((600, 600))
print(len(os.listdir("/proc/self/task")))
"""


@pytest.fixture(params=["process", pytest.param("apptainer", marks=pytest.mark.slow)])
def kind(request) -> str:
    return request.param


def made(kind: str, threads: int, request: pytest.FixtureRequest) -> Sandboxes:
    if kind == "process":
        return varied(Process, threads=threads)()
    apptainer: Apptainer = request.getfixturevalue("apptainer")
    mount = f"{Path(numpy.__file__).parents[1]}:{PACKAGES}"
    return Apptainer(images=apptainer.images, limits=Limits(threads=threads), mounts=(mount,))


@pytest.mark.parametrize("threads", [1, 2])
def test_numpy_starts_as_many_threads_as_it_may(kind, threads, task, request):
    """In programs, which forks of a warm interpreter run, in shells, and in what these start."""
    with made(kind, threads, request).open(task) as sandbox:
        if kind == "apptainer" and not sandbox.run("python3 -V", 60).output.startswith(
            f"Python {sys.version_info.major}.{sys.version_info.minor}."
        ):
            pytest.skip("numpy of this Python cannot be loaded by that of the image")
        sandbox.write("count.py", COUNT.encode())
        started = min(threads, len(os.sched_getaffinity(0)))  # OpenBLAS starts no more than there are cores
        assert sandbox.python(COUNT, 60).output == f"{started}\n"
        assert sandbox.run("python3 count.py; nproc", 60).output == f"{started}\n{threads}\n"
        run = f"import subprocess\nsubprocess.run(['python3', '-I', '-c', {COUNT!r}])"
        assert sandbox.python(run, 60).output == f"{started}\n"
