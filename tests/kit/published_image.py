"""An image of the toy repository with all that published ones of SWE-smith and of R2E-Gym hold."""

import shutil
import subprocess
from pathlib import Path

from hpc_swe.makers.images.sources import apptainer
from tests.kit.images import UNPACKED, require_apptainer
from tests.kit.toy import MENDED, MORE_PYTESTS, PYTESTS, git, make_repository

TESTS = PYTESTS + MORE_PYTESTS
HIDDEN = "tests/test_plain.py"
R2E_TESTS = """from calc.core import add, double


def test_sum():
    assert add(20, 22) == 42


def test_twice():
    assert double(21) == 42


class TestNever:
    def test_zero(self):
        assert add(4, 4) == 5
"""


def publish(folder: Path) -> Path:
    """Make published.sif in a folder; its repository is at the commit before the last, which subtracts."""
    require_apptainer(UNPACKED)
    tree, sif = folder / "tree", folder / "published.sif"
    subprocess.run(["cp", "-a", str(UNPACKED), str(tree)], check=True, timeout=300)
    shutil.rmtree(tree / "testbed", ignore_errors=True)
    commit = make_repository(tree / "testbed", {HIDDEN: TESTS})
    git(tree / "testbed", "reset", "-q", "--hard", commit)
    run_it = '#!/bin/sh\nexec python3 "$@"\n'
    made = {
        "testbed/run_tests.sh": "python -m pytest r2e_tests\n",
        "testbed/.venv/bin/python": run_it,
        "testbed/calc/__pycache__/core.cpython-311.pyc": MENDED,
        "r2e_tests/__init__.py": "",
        "r2e_tests/test_1.py": R2E_TESTS,
        "opt/miniconda3/bin/activate": 'conda() { PATH="/opt/miniconda3/envs/testbed/bin:$PATH"; }\n',
        "opt/miniconda3/envs/testbed/bin/python": run_it,
    }
    for path, text in made.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
        (tree / path).chmod(0o755)
    apptainer("build", str(sif), str(tree), work=folder)
    shutil.rmtree(tree)
    return sif
