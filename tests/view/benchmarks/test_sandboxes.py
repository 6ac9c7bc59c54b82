"""The benchmark of sandboxes prints its table."""

import subprocess
import sys

import pytest

from tests.kit.checkout import IMAGES, ROOT, environment

ROWS = ("open a sandbox", "tool evaluate", "close a sandbox", "a grading")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process", "apptainer"])
def test_the_benchmark_says_what_each_part_takes(kind):
    if kind == "apptainer" and not (IMAGES / "python-pytest.sif").exists():
        pytest.skip("the task image is not built: containers/build_image.sh")
    words = ["--tasks", "3", "--type", kind, "--images", str(IMAGES)]
    line = [sys.executable, "-m", "hpc_swe.benchmarks.sandboxes", *words]
    done = subprocess.run(
        line, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    for name in ROWS:
        (row,) = [row for row in done.stdout.splitlines() if row.startswith(name + " ")]
        assert float(row.split()[-1]) > 0, done.stdout
    assert "2 at a time" in done.stdout
