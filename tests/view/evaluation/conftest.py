"""A small evaluation: toy rows of SWE-bench, an engine with written replies, sandboxes that are none."""

from pathlib import Path

import pytest

from tests.kit.small_evaluation import Small, make


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return make(tmp_path)
