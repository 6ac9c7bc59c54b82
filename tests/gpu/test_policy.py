"""The policy on this machine's GPUs; policy_smoke.py prints the figures."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: the policy is not tested on one"
    ),
]

from tests.bench import policy_smoke  # noqa: E402


@pytest.fixture(scope="module")
def figures(tmp_path_factory, request):
    monkey = pytest.MonkeyPatch()
    monkey.setenv("TORCHDYNAMO_DISABLE", "0")
    runs = policy_smoke.Runs(tmp_path_factory.mktemp("policy"))
    yield {size: list(runs.check(size)) for size in reversed(policy_smoke.SIZES)}
    monkey.undo()


@pytest.mark.parametrize("size", [1, 2])
def test_the_policy_on_cuda_is_that_of_transformers(figures, size):
    if size not in figures:
        pytest.skip(
            f"{size} GPUs are needed, {torch.cuda.device_count()} found: tensor parallelism is not tested"
        )
    assert not [str(check) for check in figures[size] if not check.passed]
