"""The kernels of gated delta nets give what plain torch gives, in packs with borders at any place."""

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

pytest.importorskip("triton", reason="tests/kit/install_packages.sh installs it")
pytest.importorskip("fla", reason="tests/kit/install_packages.sh installs it")
pytest.importorskip("megatron.core")

from hpc_swe.models.policies._megatron.kernels.delta_rule import (  # noqa: E402
    Borders,
    convolved,
    delta_rule,
)
from hpc_swe.models.policies._megatron.kernels.linear_attention import Ends  # noqa: E402
from tests.kit import interpreted_fla  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE, DTYPE, NEAR = ("cuda", torch.bfloat16, 2e-2) if CUDA else ("cpu", torch.float32, 1e-5)
"""What the kernels compute in, and their largest distance as a share of the largest value."""
LENGTHS = [1, 63, 64, 5, 65, 2, 130]
GROUPS, HEADS, KEY, VALUE, CHANNELS = 2, 4, 16, 32, 24


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> None:
    if not CUDA:
        interpreted_fla.prepare()


def compare(function, inputs: list[Tensor]) -> None:
    """Compare outputs and gradients; the reference has float32 values of the same inputs."""
    found, slopes = run(function, inputs, Borders(LENGTHS, Ends.of(LENGTHS, inputs[0].device)))
    wanted, right = run(function, [each.float() for each in inputs], Borders(LENGTHS))
    for mine, other in zip((found, *slopes), (wanted, *right), strict=True):
        assert mine.shape == other.shape
        assert (mine - other).abs().max() <= NEAR * other.abs().max()


def run(function, inputs: list[Tensor], borders: Borders) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    found = function(*leaves, borders)
    weights = torch.linspace(-1, 1, found.numel(), device=DEVICE).view(found.shape).sin()
    return found, grad((found.float() * weights).sum(), leaves)


def random(*shape: int) -> Tensor:
    return torch.randn(sum(LENGTHS), *shape, device=DEVICE).to(DTYPE)


def test_no_state_passes_a_border_in_the_kernels_of_the_rule() -> None:
    torch.manual_seed(0)
    query, key, value = random(GROUPS, KEY), random(GROUPS, KEY), random(HEADS, VALUE)
    decay, rate = -0.1 * random(HEADS).float().exp(), random(HEADS).sigmoid()
    compare(delta_rule, [query, key, value, decay, rate])


def test_no_state_passes_a_border_in_the_kernels_of_the_convolution() -> None:
    torch.manual_seed(1)
    compare(convolved, [random(CHANNELS), torch.randn(CHANNELS, 1, 4, device=DEVICE).to(DTYPE)])
