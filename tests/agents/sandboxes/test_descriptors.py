"""Programs of a sandbox that leave descriptors unread cost no other sandbox of the same user anything."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.kit.checkout import ROOT, environment

pytestmark = pytest.mark.slow
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def test_descriptors_in_flight_cost_only_those_who_leave_them(apptainer):
    become = NOBODY if os.geteuid() == 0 else []  # the kernel does not limit root
    images = Path(apptainer.images).resolve()
    if (
        become
        and subprocess.run(
            [*become, "cat", images / "python-pytest.sif", ROOT / "pyproject.toml"], stdout=subprocess.DEVNULL
        ).returncode
    ):
        pytest.skip("an ordinary user cannot read this checkout or its images")
    folder = tempfile.mkdtemp(prefix="hpc_swe-crowded-")
    try:
        Path(folder).chmod(0o777)
        shown = environment(HOME=folder, TMPDIR=folder, PYTHONDONTWRITEBYTECODE="1")
        line = [*become, sys.executable, "-m", "tests.kit.crowded_sandboxes", str(images)]
        done = subprocess.run(line, env=shown, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=500)
        assert done.returncode == 0
        said = json.loads(done.stdout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert said["quiet"] == ["0 quiet"]
    assert "137 " in said["crowds"], "whoever comes second may be refused by the limit"
    before, refused, after = said["host"]
    assert before == after == "0 quiet", "who has none in flight is not killed"
    assert "too many descriptors in flight" in refused
