"""A small evaluation: toy rows of SWE-bench, an engine with written replies, sandboxes that are none."""

import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / beside) for beside in ("unit", "swebench")]

from small_evaluation import Small, make  # noqa: E402


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return make(tmp_path)
