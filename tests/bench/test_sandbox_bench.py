"""The benchmark of the sandbox goes on working."""

import subprocess
import sys

import pytest

from tests.kit.checkout import IMAGES, ROOT

IMAGE = IMAGES / "python-pytest.sif"


@pytest.mark.slow
def test_the_benchmark_prints_its_table():
    if not IMAGE.exists():
        pytest.skip("the task image is not built: containers/build_image.sh")
    line = [sys.executable, "-m", "tests.bench.sandbox_bench", str(IMAGE), "--starts", "3", "--commands", "5"]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    rows = {row.split("|")[1].strip(): row.split("|")[2:4] for row in done.stdout.splitlines() if "|" in row}
    for name in ("start, ms", "first start of an image, ms", "`true`, ms"):
        assert all(float(column.split()[0]) > 0 for column in rows[name]), done.stdout
