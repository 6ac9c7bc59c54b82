"""Images on a node's own disk: unpacked once, by one, whole or not at all, within bounds, from ours only."""

import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.sandboxes import _local
from hpc_swe.agents.sandboxes._local import LocalImages
from hpc_swe.agents.sandboxes.apptainer import Apart, Apptainer
from hpc_swe.cluster.processes import start_time
from tests.kit.checkout import environment
from tests.kit.constants import varied
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
UNPACK = """
import sys
from pathlib import Path
from hpc_swe.agents.sandboxes._local import LocalImages
with LocalImages(sys.argv[2], 50.0, 300.0, "apptainer").unpacked(Path(sys.argv[1])) as tree:
    print(tree and tree.stat().st_ino)
"""


@pytest.fixture
def sif(apptainer, tmp_path) -> Path:
    if shutil.which("unsquashfs") is None:
        pytest.skip("squashfs-tools, which Apptainer brings along, are missing")
    file = tmp_path / "images" / "small.sif"
    file.parent.mkdir()
    file.symlink_to(Path(apptainer.images, "python-pytest.sif"))
    return file


@pytest.fixture
def disk(tmp_path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def local(disk: Path, most_gb: float = 50.0) -> LocalImages:
    _local._warned.clear()
    return LocalImages(str(disk), most_gb, 300.0, "apptainer")


def kept(disk: Path) -> list[Path]:
    return sorted(disk.glob("hpc_swe-*/*"))


def another(sif: Path, name: str) -> Path:
    shutil.copy(sif, sif.with_name(name))
    return sif.with_name(name)


def instead_of_unsquashfs(folder: Path, script: str) -> dict[str, str]:
    """An environment in which a program of this text is found first."""
    program = folder / "bin" / "unsquashfs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return environment(PATH=f"{program.parent}:{os.environ['PATH']}")


def test_a_sandbox_runs_from_the_nodes_disk(sif, disk, task, monkeypatch, caplog):
    monkeypatch.setenv("NODE_DISK", str(disk))
    sandboxes = varied(Apptainer, warm_containers=0)(images=str(sif.parent), local="$NODE_DISK")
    with sandboxes.open(msgspec.structs.replace(task, image="small")) as sandbox:
        assert sandbox.run("touch /usr/new; rm -r /usr/lib/python3; ls /usr/new; cat mod.py", 30).output == (
            "/usr/new\nx = 1\n"
        )
    (image,) = kept(disk)
    assert image.parent.stat().st_mode & 0o777 == 0o700
    assert (image / "tree/usr/lib/python3").is_dir(), "sandboxes write elsewhere"
    assert int((image / "bytes").read_text()) > sif.stat().st_size
    assert not caplog.records


def test_four_processes_at_once_unpack_once(sif, disk, tmp_path):
    real = shutil.which("unsquashfs")
    environment = instead_of_unsquashfs(tmp_path, f'echo once >> {tmp_path}/count; exec {real} "$@"')
    line = [sys.executable, "-c", UNPACK, str(sif), str(disk)]

    def unpack(_: int) -> str:
        return subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, timeout=600).stdout

    with ThreadPoolExecutor(4) as pool:
        trees = set(pool.map(unpack, range(4)))
    (image,) = kept(disk)
    assert trees == {f"{(image / 'tree').stat().st_ino}\n"}
    assert (tmp_path / "count").read_text() == "once\n"


def test_what_a_killed_process_left_is_swept_and_its_unpacking_ends(sif, disk, tmp_path):
    script = f"echo $$ > {tmp_path}/pid; exec sleep 600"
    environment = instead_of_unsquashfs(tmp_path, script)
    process = subprocess.Popen([sys.executable, "-c", UNPACK, str(sif), str(disk)], env=environment)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the unpacking")
    (left,) = kept(disk)
    (left / "tree").mkdir()
    (left / "tree" / "half").write_text("of an image")
    process.kill()
    process.wait()
    with local(disk).unpacked(sif) as tree:
        assert (tree / "usr").is_dir()
        assert not (tree / "half").exists()
        assert kept(disk) == [tree.parent]
    assert start_time(int((tmp_path / "pid").read_text())) is None


def test_an_image_in_use_is_kept_and_an_unused_one_makes_room(sif, disk, caplog):
    other = another(sif, "other.sif")
    bounded = local(disk, most_gb=4.5 * sif.stat().st_size / 1e9)
    with bounded.unpacked(sif) as tree:
        with bounded.unpacked(other) as refused:
            assert refused is None
        assert "beside the images in use" in caplog.text
        assert (tree / "usr").is_dir()
    with bounded.unpacked(other) as tree:
        assert (tree / "usr").is_dir()
        assert kept(disk) == [tree.parent]


def test_an_image_that_was_built_again_is_unpacked_again(sif, disk):
    file = another(sif, "again.sif")
    with local(disk).unpacked(file) as tree:
        before = tree
    os.utime(file, (1, 1))
    with local(disk).unpacked(file) as tree:
        assert tree != before


def test_a_full_disk_costs_the_unpacking_only(sif, disk):
    """No more files can be made there, though there is room for their bytes."""
    script = f"""
mount -t tmpfs -o nr_inodes=500 tmpfs {disk} &&
{sys.executable} -c '{UNPACK}' {sif} {disk} && find {disk} -mindepth 2 | wc -l"""
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout == "None\n0\n", done.stderr
    assert "No space left" in done.stderr


@pytest.mark.parametrize("mode", [0o777, None])
def test_a_folder_that_others_could_have_filled_is_not_used(sif, disk, mode, caplog):
    root = disk / f"hpc_swe-{os.geteuid()}"
    if mode is None:
        (disk / "elsewhere").mkdir(mode=0o700)
        root.symlink_to("elsewhere")
    else:
        root.mkdir()
        root.chmod(mode)
    with local(disk).unpacked(sif) as tree:
        assert tree is None
    assert "is no private folder of this user" in caplog.text
    assert list(root.iterdir()) == []


def test_without_the_nodes_disk_it_is_told_once_and_sandboxes_open(sif, task, caplog):
    caplog.set_level(logging.WARNING)
    sandboxes = Apart(images=str(sif.parent), local="$NO_SUCH_DISK")
    _local._warned.clear()
    for _ in range(2):
        with sandboxes.open(msgspec.structs.replace(task, image="small")) as sandbox:
            assert sandbox.run("true", 30).exit_code == 0
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "packed: local = '$NO_SUCH_DISK': there is no such environment variable here"
    ]


def test_a_thinned_image_starts_from_its_file_and_is_forgotten(sif, disk, task, caplog):
    sandboxes = Apart(images=str(sif.parent), local=str(disk))
    mine = msgspec.structs.replace(task, image="small")
    with local(disk).unpacked(sif) as tree:
        shutil.rmtree(tree / "usr")
        with sandboxes.open(mine) as sandbox:
            assert sandbox.run("cat mod.py", 30).output == "x = 1\n"
        assert kept(disk) == [tree.parent], "somebody runs it"
    with sandboxes.open(mine) as sandbox:
        assert sandbox.run("cat mod.py", 30).output == "x = 1\n"
    assert kept(disk) == []
    assert "it is removed" in caplog.text
    with sandboxes.open(mine):
        assert (tree / "usr").is_dir()
