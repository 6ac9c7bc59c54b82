"""The command for the benchmark of checkpoints, on the CPU with a tiny shape."""

import subprocess
import sys

import pytest

from hpc_swe.view.benchmarks.checkpoint import rows
from hpc_swe.view.benchmarks.checkpoint_side import SaveTimes
from tests.kit.checkout import ROOT, environment


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpc_swe.benchmarks.checkpoint", *words]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{}/none"], "none: cannot make a folder there: No such file"),
        (["{}", "--ranks", "3", "--tensor-parallel", "2"], "--ranks 3 is no multiple of the 2"),
        (["{}", "learner.checkpoint_s=0"], "keys of [policy] only"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(tmp_path, words, message):
    done = run(*(word.format(tmp_path) for word in words))
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_saves_are_compared_with_plain_writes():
    times = SaveTimes(size=6_000_000_000, first_s=4.0, saved_s=6.0, plain_s=3.0, loaded_s=2.0)
    _, *columns = rows(times).columns
    cells = [list(column.cells) for column in columns]
    assert list(zip(*cells, strict=True)) == [
        ("4.00", "1.50", "75"),
        ("6.00", "1.00", "50"),
        ("3.00", "2.00", "100"),
        ("2.00", "3.00", "-"),
    ]


@pytest.mark.slow
def test_ranks_save_and_load_and_leave_nothing(tmp_path):
    pytest.importorskip("megatron.core")
    done = run("--ranks", "2", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("first one", "saved and published", "plain bytes", "verified and loaded"):
        assert f"\n{row}" in done.stdout
    assert not list(tmp_path.iterdir())
