"""The sandbox that isolates nothing still keeps the seam's promises."""

import logging
import time
from pathlib import Path

import pytest

from hpc_swe.plugins.sandboxes import process
from hpc_swe.plugins.sandboxes.process import Process


def test_it_says_once_and_loudly_that_it_isolates_nothing(task, caplog):
    process._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with Process().open(task):
                pass
    assert [r.message.partition(":")[0] for r in caplog.records] == ["unisolated"]


def test_commands_programs_and_files(task, tmp_path: Path):
    with Process(scratch=str(tmp_path)).open(task) as sandbox:
        assert sandbox.run("cat mod.py; echo err >&2; exit 3", 10).output == "x = 1\nerr\n"
        assert sandbox.run("exit 3", 10).exit_code == 3
        assert sandbox.run("kill -9 $$", 10).exit_code == 137
        assert (
            sandbox.python("import sys; print(sys.flags.isolated, __name__); sys.exit(4)", 10).exit_code == 4
        )
        sandbox.write("a/b", b"1")
        assert sandbox.run("cat a/b; chmod 000 a", 10).output == "1"
    assert list(tmp_path.iterdir()) == []


def test_time_ends_a_command_and_what_it_left_running(task):
    with Process().open(task) as sandbox:
        began = time.monotonic()
        result = sandbox.run("trap '' TERM; sleep 600 & sleep 600", 0.3)
        assert (result.timed_out, result.exit_code) == (True, 137)
        sandbox.run("setsid sh -c 'trap \"\" TERM HUP; sleep 1; touch late' & echo", 10)
        assert time.monotonic() - began < 300
        time.sleep(1.2)
        assert "late" not in sandbox.paths()


def test_a_file_that_cannot_be_laid_out_is_the_host_s_error(task):
    import msgspec

    from hpc_swe.errors import SandboxError

    bad = msgspec.structs.replace(task, files={"../out": "x"})
    with pytest.raises(SandboxError, match="lay out the files of t"), Process().open(bad):
        pass
