"""Many images in one process: few containers idle, none is ended under a sandbox, none waits for another."""

import os
import random
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.sandboxes._session import end_namespace
from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.base.errors import SandboxError
from tests.kit.constants import varied

pytestmark = pytest.mark.slow
PATIENCE_S = 180.0


@pytest.fixture
def many(apptainer, tmp_path) -> str:
    """Twelve images, of names that no other test has."""
    for number in range(12):
        for suffix in ("", ".sif"):
            found = Path(apptainer.images, f"python-pytest{suffix}")
            if found.exists():
                (tmp_path / f"{tmp_path.name}-{number}{suffix}").symlink_to(found)
    return str(tmp_path)


def image(many: str, number: int) -> str:
    return f"{Path(many).name}-{number}"


def containers(many: str) -> list[int]:
    """Containers of these images that this process holds, by the process that each begins with.

    Every process is asked for its parent: each thread has a list of its children, and while one ends they
    are in none.
    """
    found = []
    for child in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = Path(f"/proc/{child}/status").read_text()
            words = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if f"PPid:\t{os.getpid()}\n" in status and f"{Path(many).name}-".encode() in words:
            found.append(int(child))
    return found


def test_twelve_images_in_four_threads_all_answer_and_few_containers_idle(many, task):
    sandboxes = varied(Apptainer, warm_containers=2)(images=many)
    most = []

    def play(number: int) -> None:
        mine = msgspec.structs.replace(task, image=image(many, number % 12))
        with sandboxes.open(mine) as sandbox:
            shown = sandbox.run(f"cat mod.py; echo {number} > mine; cat mine", 30).output
            assert shown == f"x = 1\n{number}\n"
            most.append(len(containers(many)))

    numbers = list(range(36))
    random.shuffle(numbers)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(play, numbers))
    assert max(most) <= 4 + 2  # in use, or just being ended by who used it, and idle
    assert len(containers(many)) <= 2


def test_a_container_in_use_outlives_the_bound_and_is_shared(many, task):
    sandboxes = varied(Apptainer, warm_containers=0)(images=many)
    with ExitStack() as stack:
        first, sibling, *others = [
            stack.enter_context(sandboxes.open(msgspec.structs.replace(task, image=image(many, number))))
            for number in (0, 0, 1, 2)
        ]
        assert len(containers(many)) == 3
        for sandbox in (first, sibling, *others):
            assert sandbox.run("echo here", 30).output == "here\n"
    assert containers(many) == []


def test_an_image_that_starts_slowly_keeps_no_other_waiting(many, task, tmp_path):
    gate, program, slow = tmp_path / "gate", tmp_path / "apptainer", image(many, 1)
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *{slow}*) until [ -e {gate} ]; do sleep 0.05; done;; esac\n'
        f'exec {shutil.which("apptainer")} "$@"\n'
    )
    program.chmod(0o755)
    sandboxes = varied(Apptainer, executable=str(program))(images=many)
    quick = msgspec.structs.replace(task, image=image(many, 0))
    ready = threading.Event()

    def wait() -> None:
        with sandboxes.open(msgspec.structs.replace(task, image=slow)) as sandbox:
            ready.set()
            assert sandbox.run("true", 30).exit_code == 0

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait) for _ in range(2)]
        try:
            for _ in range(2):
                with sandboxes.open(quick) as sandbox:
                    assert sandbox.run("true", 30).exit_code == 0
            assert not ready.is_set()
        finally:
            gate.touch()
        for future in waiting:
            future.result(PATIENCE_S)
    assert len(containers(many)) <= 2  # the two who waited share one


def test_an_idle_container_that_died_is_replaced(many, task):
    sandboxes = Apptainer(images=many)
    mine = msgspec.structs.replace(task, image=image(many, 0))
    with sandboxes.open(mine):
        pass
    (died,) = containers(many)
    end_namespace(died)
    os.waitid(os.P_PID, died, os.WEXITED | os.WNOWAIT)
    with sandboxes.open(mine) as sandbox:
        assert sandbox.run("true", 30).exit_code == 0
    assert died not in containers(many)


def test_an_image_that_does_not_start_is_tried_again_and_keeps_nothing(many, task, tmp_path):
    program = tmp_path / "apptainer"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    sandboxes = varied(Apptainer, executable=str(program))(images=many)
    mine = msgspec.structs.replace(task, image=image(many, 0))
    with pytest.raises(SandboxError), sandboxes.open(mine):
        pass
    subprocess.run(["ln", "-sf", shutil.which("apptainer"), program], check=True)
    with sandboxes.open(mine) as sandbox:
        assert sandbox.run("true", 30).exit_code == 0
