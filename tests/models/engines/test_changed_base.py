"""An engine whose layers are reloaded reads the model below adapters twice: its files must stay the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.checkout import ROOT, environment
from tests.kit.waiting import DEADLINE_S

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow


def test_only_a_base_that_changes_between_staging_and_swap_ends_the_engine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.changed_base", str(tmp_path)],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "exit codes [0, 1]" in done.stdout, done.stdout
    assert done.stdout.count("served the merged weights") == 1
    assert "model: model.safetensors: it is no longer the file that was verified" in done.stdout
