"""A file system that refuses: full, over quota, failing, read-only. The suite says so, and loses nothing."""

import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from hpc_swe.base import metrics
from hpc_swe.base.errors import StorageError
from hpc_swe.base.store import atomic, folders
from tests.kit.crash import FORK, in_child
from tests.kit.store_samples import publish, request, shown, spool


@pytest.fixture
def small(tmp_path, tmpfs):
    """A real file system of 64 KiB."""
    return tmpfs(tmp_path / "small", "size=64k")


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.name != ".."]


def fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(b"x" * 1_000_000)
    return ballast


def test_on_a_full_disk_nothing_is_published_and_later_it_works_again(small):
    made = spool(small / "requests")
    cell = small / "cell.json"
    atomic.put(cell, request(0))
    ballast = fill(small)
    for publication in (
        lambda: made.put("a", request(1)),
        lambda: atomic.put(cell, request(2)),
        lambda: atomic.put(cell, request(2), durable=False),
        lambda: publish(small / "v1"),
    ):
        with pytest.raises(StorageError, match="no space is left"):
            publication()
    assert shown(small) == ["ballast", "cell.json"]
    assert leftovers(small) == []
    assert atomic.get(cell, type(request())) == request(0), "a cell is replaced, or stays as it was"
    ballast.unlink()
    made.put("a", request(1))
    publish(small / "v1")
    assert next(made.claims("w"), None).finish()


def test_a_full_disk_still_lets_workers_finish_and_give_back(small):
    made = spool(small, messages=2)
    fill(small)
    first, second = made.claims("w")
    assert first.finish()
    assert second.give_back()
    assert len(made.addresses("ready")) == 1


def test_a_file_system_mounted_read_only_is_one_clear_error(small):
    made = spool(small, messages=1)
    publish(small / "v1")
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    for action in (
        lambda: made.put("a", request()),
        lambda: next(made.claims("w"), None),
        lambda: publish(small / "v2"),
        lambda: folders.remove(small / "v1"),
    ):
        with pytest.raises(StorageError, match=f"{small}.*read-only"):
            action()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.EDQUOT, "quota"),
        (errno.EIO, "I/O error"),
        (errno.ESTALE, "stale"),
        (errno.ESHUTDOWN, "evicted"),
        (errno.ENOTCONN, "failing over"),
        (errno.ETIMEDOUT, "failing over"),
    ],
    ids=errno.errorcode.get,
)
def test_what_a_parallel_file_system_answers_in_trouble_is_a_storage_error(code, message):
    with (
        pytest.raises(StorageError, match=f"^/run/requests: .*{message}"),
        atomic.storage(Path("/run/requests")),
    ):
        raise OSError(code, os.strerror(code))


def put_as_an_ordinary_user(folder: Path, sender) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    for action in (lambda: spool_put(folder), lambda: publish(folder / "v1")):
        try:
            action()
        except StorageError as error:
            sender.send(str(error))


def spool_put(folder: Path) -> None:
    atomic.put(folder / "cell.json", request())


def test_a_folder_of_somebody_else_is_one_clear_error():
    folder = Path(tempfile.mkdtemp(prefix="hpc_swe-readonly-"))
    try:
        folder.chmod(0o555)
        receiver, sender = FORK.Pipe(duplex=False)
        assert in_child(put_as_an_ordinary_user, folder, sender) == 0
        for name in ("cell.json", ".tmp-v1"):
            assert receiver.poll(5)
            message = receiver.recv()
            assert message.startswith(f"{folder}/{name}"), message
            assert "permission is denied; is the run yours?" in message
    finally:
        shutil.rmtree(folder)


def test_a_writer_that_is_told_to_exit_takes_its_temporaries_along(tmp_path):
    def interrupted(stage: Path):
        folders.write(stage, "half", b"x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folders.publish(tmp_path / "v1", interrupted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o027, 0o640), (0, 0o640)])
def test_the_umask_alone_says_who_may_read_what_is_published(tmp_path, umask, mode):
    """Nothing else is remembered between two runs of one process. A secret is for its owner in any case."""
    before = os.umask(umask)
    atomic.write(tmp_path / "cell", b"")
    atomic.write_secret(tmp_path / "token", b"secret")
    metrics.Log(tmp_path / "log")
    os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"cell": mode, "log": mode, "token": 0o600}
