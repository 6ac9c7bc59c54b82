"""Node-local leftovers of the dead are swept, and nothing else is."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from hpc_swe.cluster import scratch

DIE = """
import os, signal, sys
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from hpc_swe.cluster import scratch
folder = scratch.make([Path(sys.argv[2])])
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
scratch.note_memory(folder, [os.getpid()])
print(folder, memory.name, flush=True)
if sys.argv[1] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


@contextlib.contextmanager
def process(place: Path, how: str) -> Iterator[tuple[Path, Path]]:
    """One that makes a folder and shared memory; it dies, or lives as long as the block."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", DIE, how, place], **pipes) as child:
        folder, memory = child.stdout.readline().split()
        if how == "die":
            child.wait()
        yield Path(folder), scratch.MEMORY / memory
        child.stdin.close()
    with contextlib.suppress(OSError):
        (scratch.MEMORY / memory).unlink()


def test_what_a_killed_process_left_is_swept_by_the_next(tmp_path: Path) -> None:
    with process(tmp_path, "die") as (folder, memory):
        assert folder.exists()
        assert memory.exists()
        mine = scratch.make([tmp_path])
        assert (folder.exists(), memory.exists(), mine.exists()) == (False, False, True)


def test_what_a_living_process_has_stays(tmp_path: Path) -> None:
    with process(tmp_path, "live") as (folder, memory):
        assert scratch.sweep([tmp_path]) == []
        assert (folder.exists(), memory.exists()) == (True, True)


def test_a_folder_stays_until_all_its_users_are_dead(tmp_path: Path) -> None:
    with process(tmp_path, "die") as (folder, _):
        scratch.own(folder)
        assert scratch.sweep([tmp_path]) == []


@pytest.mark.parametrize("owners", [None, "", "nonsense", "1 2 3"])
def test_a_folder_that_does_not_say_whose_it_is_stays(tmp_path: Path, owners: str | None) -> None:
    folder = Path(tempfile.mkdtemp(prefix=scratch.PREFIX, dir=tmp_path))
    if owners is not None:
        (folder / scratch.OWNERS).write_text(owners)
    assert scratch.sweep([tmp_path]) == []


def test_an_empty_folder_is_swept_once_its_maker_must_have_listed_itself(tmp_path: Path) -> None:
    empty, used = (Path(tempfile.mkdtemp(prefix=scratch.PREFIX, dir=tmp_path)) for _ in range(2))
    (used / "file").touch()
    assert scratch.sweep([tmp_path]) == []
    for folder in (empty, used):
        os.utime(folder, (0, 0))
    assert scratch.sweep([tmp_path]) == [empty]


def test_owners_of_another_namespace_are_unknown_and_of_another_boot_dead(tmp_path: Path) -> None:
    boot, namespace = scratch._boot_and_namespace().split()
    folder = Path(tempfile.mkdtemp(prefix=scratch.PREFIX, dir=tmp_path))
    (folder / scratch.OWNERS).write_text(f"999999999 1 {boot} {int(namespace) + 1}\n")
    assert scratch.sweep([tmp_path]) == []
    (folder / scratch.OWNERS).write_text(f"999999999 1 another-boot {namespace}\n")
    assert scratch.sweep([tmp_path]) == [folder]


def test_processes_sweep_the_same_folders_at_once(tmp_path: Path) -> None:
    for _ in range(500):
        folder = Path(tempfile.mkdtemp(prefix=scratch.PREFIX, dir=tmp_path))
        (folder / scratch.OWNERS).write_text("1 1 another-boot 1\n")
        (folder / scratch.SHARED).touch()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(scratch.sweep, [[tmp_path]] * 4))
    assert not list(tmp_path.iterdir())


def test_shared_memory_that_took_a_noted_name_since_stays(tmp_path: Path) -> None:
    memory = shared_memory.SharedMemory(create=True, size=4096)
    try:
        folder = Path(tempfile.mkdtemp(prefix=scratch.PREFIX, dir=tmp_path))
        path = scratch.MEMORY / memory.name
        (folder / scratch.SHARED).write_text(f"{path.stat().st_ino + 1} {path}\n")
        scratch.remove(folder)
        assert path.exists()
        assert not folder.exists()
    finally:
        memory.close()
        memory.unlink()
