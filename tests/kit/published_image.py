"""Images of the toy repository with all that published ones hold."""

import shutil
import subprocess
from dataclasses import dataclass
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


_RUN_IT = '#!/bin/sh\nexec python3 "$@"\n'
_PROGRAMS = {
    "usr/local/bin/python": _RUN_IT,
    "usr/local/bin/pytest": '#!/bin/sh\nexec python3 -m pytest "$@"\n',
    "opt/miniconda3/bin/activate": 'conda() { PATH="/opt/miniconda3/envs/testbed/bin:$PATH"; }\n',
    "opt/miniconda3/envs/testbed/bin/python": _RUN_IT,
}
_FAST = ("--mksquashfs-args", "-comp zstd -Xcompression-level 3")


_UNUSED = ("share", "lib/git-core", "lib/x86_64-linux-gnu/perl", "lib/x86_64-linux-gnu/gconv")
"""Half of the task image, which no test here needs: each set builds an image of its own."""


@dataclass(frozen=True)
class PublishedImage:
    """An image whose repository has the base commit of tasks, without their tests."""

    sif: Path
    base: str


def publish_base(sif: Path, workdir: str) -> PublishedImage:
    """Make an image of rows with a test patch; its repository is at the commit that subtracts."""
    tree = _unpacked(sif.parent)
    base = _repository(tree / workdir.lstrip("/"), {})
    return PublishedImage(_packed(tree, {}, sif), base)


def publish(folder: Path) -> Path:
    """Make published.sif in a folder, an image of SWE-smith and of R2E-Gym, which holds the tests."""
    tree = _unpacked(folder)
    _repository(tree / "testbed", {HIDDEN: TESTS})
    made = {
        "testbed/run_tests.sh": "python -m pytest r2e_tests\n",
        "testbed/.venv/bin/python": _RUN_IT,
        "testbed/calc/__pycache__/core.cpython-311.pyc": MENDED,
        "r2e_tests/__init__.py": "",
        "r2e_tests/test_1.py": R2E_TESTS,
    }
    return _packed(tree, made, folder / "published.sif")


def _unpacked(folder: Path) -> Path:
    require_apptainer(UNPACKED)
    tree = folder / "tree"
    subprocess.run(["cp", "-a", str(UNPACKED), str(tree)], check=True, timeout=300)
    for name in ("testbed", *(f"usr/{part}" for part in _UNUSED)):
        shutil.rmtree(tree / name, ignore_errors=True)
    return tree


def _packed(tree: Path, files: dict[str, str], sif: Path) -> Path:
    for path, text in (files | _PROGRAMS).items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
        (tree / path).chmod(0o755)
    apptainer("build", *_FAST, str(sif), str(tree), work=sif.parent)
    shutil.rmtree(tree)
    return sif


def _repository(folder: Path, more: dict[str, str]) -> str:
    folder.parent.mkdir(parents=True, exist_ok=True)
    commit = make_repository(folder, more)
    git(folder, "reset", "-q", "--hard", commit)
    return commit
