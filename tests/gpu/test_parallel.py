"""The comparison of layouts runs on a CPU too; tests/plugins/policies/test_parity.py compares more there."""

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from tests.gpu import parallel  # noqa: E402


def test_learners_agree_with_transformers_repeat_their_steps_and_resume(tmp_path):
    cases = [
        ("dense", "bfloat16", "CP=2"),
        ("experts", "float32", "EP=2 DP=2"),
        ("llama", "bfloat16", "products"),
        ("mistral", "float32", "TP=2"),
        ("dense", "float32", "lora TP=2"),
        ("experts", "bfloat16", "again EP=2 DP=2"),
        ("dense", "bfloat16", "hosted 0.6"),
        ("dense", "float32", "resumed"),
    ]
    results = list(parallel.Comparison(tmp_path, cases).results())
    assert [result.case for result in results] == cases
    assert not [str(result) for result in results if not result.passed]
