"""Backward recomputes what a layer did not keep, with the same gradients; short sequences share a kernel."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from hpc_swe.plugins.policies._megatron.packing import SHORT, grouped  # noqa: E402
from hpc_swe.plugins.policies._megatron.recompute import Recomputing, keep  # noqa: E402


def layer(cheap, costly, value, weight):
    """Return a chain like that of a layer: two elementwise functions around a product."""
    normed, left = cheap(lambda x: (x.sin(), x.cos()), value)
    product = costly(lambda x: x @ weight, normed)
    return cheap(torch.exp, product[:, 1:]).mul(left[:, 1:]) @ weight[1:]


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 5, generator=generator, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize("is_product_recomputed", [False, True])
def test_gradients_are_bit_for_bit_those_of_values_that_were_kept(inputs, is_product_recomputed):
    wanted = torch.autograd.grad(layer(keep, keep, *inputs).square().sum(), inputs)
    with Recomputing() as recompute:
        result = layer(recompute, recompute if is_product_recomputed else keep, *inputs)
    found = torch.autograd.grad(result.square().sum(), inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_recomputed_values_are_freed_until_backward_needs_them(inputs):
    made = []

    def sine(value):
        result = value.sin()
        made.append(StorageWeakRef(result.untyped_storage()))
        return result

    with Recomputing() as recompute:
        result = recompute(sine, inputs[0]) @ inputs[1]
    assert [each.expired() for each in made] == [True]
    torch.autograd.grad(result.sum(), inputs)
    assert [each.expired() for each in made] == [True, True]


class InBuffer(torch.autograd.Function):
    """Copy a tensor to memory of the test, where the next tensor can lie, too."""

    @staticmethod
    def forward(ctx, value, buffer):
        return torch.from_numpy(buffer).copy_(value)


def test_results_are_freed_at_once_and_their_memory_is_not_mistaken(inputs):
    value, weight = inputs
    buffer = np.empty((5, 5), np.float32)
    with Recomputing() as recompute:
        sine = recompute(lambda x: InBuffer.apply(x.sin(), buffer), value)
        place, storage = sine.data_ptr(), StorageWeakRef(sine.untyped_storage())
        del sine
        assert storage.expired()
        other = torch.from_numpy(buffer).copy_(value.detach().cos()).requires_grad_()
        assert other.data_ptr() == place
        result = other @ weight
    (found,) = torch.autograd.grad(result.sum(), weight)
    assert torch.equal(found, other.detach().T @ torch.ones(5, 5))


@pytest.mark.parametrize(
    ("kernels", "lengths", "groups"),
    [
        ("cuDNN", [SHORT], [(SHORT,)]),
        ("cuDNN", [5, 7], [(5, 7)]),
        ("cuDNN", [5, SHORT, SHORT, 7, 3], [(5,), (SHORT,), (SHORT,), (7, 3)]),
        ("flash-attn-4", [5, SHORT, SHORT, 7, 3], [(5, SHORT, SHORT, 7, 3)]),
        ("torch", [5, SHORT, 7], [(5,), (SHORT,), (7,)]),
    ],
)
def test_sequences_are_grouped_by_the_kernels_that_take_them(kernels, lengths, groups):
    assert grouped(lengths, kernels) == groups
