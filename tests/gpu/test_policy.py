"""The policy on this machine's GPUs, as `python -m tests.gpu.parallel` compares it with transformers."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: the policy is not tested on one"
    ),
]

from tests.gpu import parallel  # noqa: E402


@pytest.mark.parametrize("layout", ["one", "TP=2", "resumed"])
def test_the_policy_on_cuda_is_that_of_transformers(layout, tmp_path, monkeypatch):
    needed = parallel.ranks_of(layout)
    if torch.cuda.device_count() < needed:
        pytest.skip(f"{needed} GPUs are needed: {layout} is not tested")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    cases = [case for case in parallel.CASES if case[0] in ("dense", "experts") and case[2] == layout]
    results = list(parallel.Comparison(tmp_path, cases).results())
    assert len(results) == len(cases)
    assert not [str(result) for result in results if not result.passed]
