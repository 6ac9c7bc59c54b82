"""A run whose processes die and freeze at random, for a minute; chaos.py does so for an hour, by hand.

The steps are small, since restarts are the subject here.
"""

import subprocess
import sys

import pytest

from tests.kit.checkout import ROOT

pytestmark = pytest.mark.slow
PATIENCE_S = 1500


def test_nothing_is_lost_doubled_or_left_after_random_deaths_and_freezes(warm_model, small_words, tmp_path):
    line = [sys.executable, "-m", "tests.bench.chaos", "--seed", "11"]
    words = ["--faults", "24", "--minutes", "1", "--model", warm_model, "--keep", tmp_path / "chaos"]
    done = subprocess.run(
        [*map(str, line + words), *small_words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout
    assert "all invariants hold" in done.stdout
    assert "25 faults" in done.stdout
