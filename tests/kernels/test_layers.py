"""The kernels of a layer's elementwise parts give what the plain functions give."""

import pytest
import torch
from torch import Tensor
from torch.func import vjp

pytest.importorskip("triton", reason="tests/kit/install_packages.sh installs it")
pytest.importorskip("megatron.core")

from hpc_swe.models.policies._megatron.kernels import kernels, triton_kernels  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Largest distance, as a share of the largest value."""
EPS = 1e-6
types = pytest.mark.parametrize("dtype", NEAR)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def require_near(found: Tensor, wanted: Tensor) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    far = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    assert far <= NEAR[found.dtype]


@types
@pytest.mark.parametrize("width", [1, 33, 2049])
def test_swiglu_and_its_gradient(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(1)
    both, grad = random(3, 2, 2 * width, dtype=dtype), random(3, 2, width, dtype=dtype)
    product, slope = vjp(kernels._swiglu, both)
    require_near(triton_kernels.swiglu(both), product)
    require_near(triton_kernels.swiglu_backward(both, grad), slope(grad)[0])


@types
@pytest.mark.parametrize("with_norms", [True, False])
def test_rotated_heads_and_their_gradients(dtype: torch.dtype, with_norms: bool) -> None:
    torch.manual_seed(2)
    tokens, groups, heads, d = 5, 3, 2, 12
    parts = random(tokens, groups, heads + 2, d, dtype=dtype)
    weights = [random(d, dtype=dtype) for _ in range(2)] if with_norms else []
    angles = torch.randn(tokens, 1, d // 2, device=DEVICE).repeat(1, 1, 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    wanted, slope = vjp(
        lambda parts, *weights: kernels._rotated_heads(EPS, parts, cosines, sines, *weights), parts, *weights
    )
    found = triton_kernels.rotated_heads(EPS, parts, cosines, sines, *weights)
    for one, other in zip(found, wanted, strict=True):
        require_near(one, other)
    grads = tuple(random(*each.shape, dtype=dtype) for each in wanted)
    found = triton_kernels.rotated_heads_backward(grads, EPS, parts, cosines, sines, *weights)
    for one, other in zip(found, slope(grads), strict=True):
        require_near(one, other)


@types
@pytest.mark.parametrize("factor", [None, torch.float32], ids=["as the states", "float32"])
def test_the_gradient_of_a_norm_and_the_residual_beside_it(
    dtype: torch.dtype, factor: torch.dtype | None
) -> None:
    """A norm that multiplies by one plus the weight does so in float32."""
    torch.manual_seed(3)
    hidden, weight = random(7, 1, 70, dtype=dtype), random(70, dtype=factor or dtype)
    residual, grad = random(7, 1, 70, dtype=dtype), random(7, 1, 70, dtype=dtype)
    _, slope = vjp(lambda hidden, weight: kernels._rms_norm(hidden, weight, EPS), hidden, weight)
    of_hidden, of_weight = slope(grad)
    found = triton_kernels.residual_norm_backward(residual, grad, hidden, weight, EPS)
    require_near(found[0], of_hidden + residual)
    require_near(found[1], of_weight)


@types
def test_rows_are_added_by_place_and_a_missing_place_adds_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    rows = random(6, 50, dtype=dtype)
    places = torch.tensor([[0, 5], [-1, 3], [-1, -1], [2, 2]], dtype=torch.int32, device=DEVICE)
    wanted = [rows[0].double() + rows[5].double(), rows[3].double(), 0 * rows[0].double()]
    wanted.append(2 * rows[2].double())
    require_near(triton_kernels.add_rows(rows, places), torch.stack(wanted).to(dtype))
