"""The benchmark of the sandbox goes on working."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / ".cache" / "images" / "python-pytest.sif"


@pytest.mark.slow
def test_the_benchmark_prints_its_table():
    if not IMAGE.exists():
        pytest.skip("the task image is not built: containers/build_image.sh")
    line = [sys.executable, "tests/scale/sandbox_bench.py", str(IMAGE), "--starts", "3", "--commands", "5"]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    rows = {row.split("|")[1].strip(): row.split("|")[2:4] for row in done.stdout.splitlines() if "|" in row}
    for name in ("start, ms", "first start of an image, ms", "`true`, ms"):
        assert all(float(column.split()[0]) > 0 for column in rows[name]), done.stdout
