"""What the file system refuses is said in one line, with the file and what the person who called can do."""

import errno
import os

import pytest

from hpc_swe.base import cli
from hpc_swe.base.errors import ConfigError, SandboxError, StorageError, boundary


def failing(number: int, *names: str | None) -> None:
    raise OSError(number, os.strerror(number), *names)


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        (errno.ENOSPC, "No space left on device; free space there"),
        (errno.EDQUOT, "exceeded; free space there"),
        (errno.EFBIG, "File too large; raise `ulimit -f`"),
        (errno.EACCES, "Permission denied: 'a'; name a folder of your own"),
        (errno.ENOENT, "No such file or directory: 'a'; name another path"),
    ],
)
def test_what_the_file_system_refuses_comes_with_its_remedy(number, wanted):
    names = ["a"] if "'a'" in wanted else []
    for kind in (ConfigError, StorageError):
        with pytest.raises(kind, match=f"^write a: .*{wanted}"), boundary(kind, "write a"):
            failing(number, *names)


def test_an_episode_s_error_gives_no_advice_about_folders():
    with pytest.raises(SandboxError, match="No space left on device$"), boundary(SandboxError, "open"):
        failing(errno.ENOSPC)


def test_of_a_copy_the_full_side_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.command(lambda: failing(errno.ENOSPC, "source", None, "target"))()
    said = capsys.readouterr().err
    assert (ended.value.code, said.partition(";")[0]) == (4, "error: target: No space left on device")
