"""An engine whose layers are reloaded reads the model below adapters twice: its files must stay the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.checkout import ROOT, environment
from tests.kit.waiting import DEADLINE_S

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow


def swap(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tests.kit.changed_base", str(folder), *words]
    return subprocess.run(
        line,
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_base_that_changes_between_staging_and_swap_ends_the_engine(tmp_path: Path) -> None:
    done = swap(tmp_path, "changed")
    assert done.returncode == 1, done.stdout
    assert "model: model.safetensors: it is no longer the file that was verified" in done.stdout
    assert "served" not in done.stdout


def test_a_base_that_stays_is_served_with_the_adapters(tmp_path: Path) -> None:
    done = swap(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "served the merged weights" in done.stdout
