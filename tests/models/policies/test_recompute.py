"""Backward recomputes what a layer did not keep, with the same gradients; short sequences share a kernel."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from safetensors.torch import load_file  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from hpc_swe.models.policies._megatron.kernels.recompute import Recomputing, keep  # noqa: E402
from hpc_swe.models.policies._megatron.memory import LEVELS  # noqa: E402
from hpc_swe.models.policies._megatron.model.packing import SHORT, grouped  # noqa: E402
from tests.kit.ranks import launcher, tiny  # noqa: E402

ROUTED = {"dense": 0, "routed": tiny.EXPERTS["num_experts"]}
"""From how many experts the sampler drew those that are replayed; a tenth of the tokens leave them free."""
STEPS = [("dense", "float32"), ("dense", "bfloat16"), ("routed", "float32")]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Take the same step with each value of `policy.recompute`, all in one job; return a folder for each."""
    folder = tmp_path_factory.mktemp("recompute")
    models, cases = tiny.make_models(folder / "models"), []
    for name, routed in ROUTED.items():
        model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
        tiny.write_sequences(folder / f"{name}.msgpack", tiny.make_sequences(model, routed=routed))
    for name, dtype in STEPS:
        same = {"model": str(models[name]), "data": str(folder / f"{name}.msgpack")}
        same |= {"packing": [[[0, 1], [2, 3]]], "optimizer": {"lr": 1e-3, "clip_grad": 0}}
        same |= {"do": [("train", 1), ("grads", "grads"), ("export", "after")]}
        for level in LEVELS:
            policy = {"dtype": dtype, "recompute": level}
            cases.append(same | {"name": f"{name}-{dtype}-{level}", "policy": policy})
    launcher.run_cases(1, cases, folder)
    return folder


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize(("name", "dtype"), STEPS)
def test_a_step_has_the_same_bits_whatever_backward_recomputes(steps, name, dtype, level):
    for what in ("grads", "after"):
        kept, found = (
            load_file(steps / f"{name}-{dtype}-{each}" / what / "model-00001-of-00001.safetensors")
            for each in ("none", level)
        )
        assert found.keys() == kept.keys()
        assert [key for key, tensor in kept.items() if not torch.equal(found[key], tensor)] == []
        assert all(tensor.any() for tensor in kept.values())


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
