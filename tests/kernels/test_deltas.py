"""The kernels of deltas give what torch gives, bit for bit."""

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="tests/kit/install_triton.sh installs it")

from hpc_swe.plugins import delta_kernels  # noqa: E402
from hpc_swe.plugins.tensor_delta import Digests, encode, integers  # noqa: E402

delta_kernels.BLOCK = 128


def stepped(old: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Differences of all kinds at some flat positions."""
    new, kinds = old.clone(), (1, -1, 2, -30000, 30000)
    for i, place in enumerate(places):
        integers(new).view(-1)[place] += kinds[i % len(kinds)]
    return new


def cases(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    old = torch.randn(7, 143).to(dtype)
    long, flat = torch.randn(5000).to(dtype), torch.randn(300).to(dtype)
    some = (torch.rand(old.numel()) < 0.1).nonzero().view(-1).tolist()
    up = flat.clone()
    integers(up).add_(1)
    return {
        "none": (old, old.clone()),
        "some": (old, stepped(old, some)),
        "at borders": (old, stepped(old, [0, 127, 128, 255, 256, 383, 1000])),
        "the last one of many blocks": (long, stepped(long, [4999])),
        "far apart": (long, stepped(long, [84, 85, 86, 171, 172, 1400, 4000, 4085, 4171])),
        "all by one": (flat, up),
        "all by anything": (flat, stepped(flat, list(range(300)))),
        "empty": (flat[:0], flat[:0].clone()),
        "one": (flat[:1], stepped(flat[:1], [0, 0])),
        "as many as blocks": (long[:256], stepped(long[:256], [3, 255])),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_others_and_digests_are_those_of_torch(dtype: torch.dtype) -> None:
    pairs = {name: (a.to(DEVICE), b.to(DEVICE)) for name, (a, b) in cases(dtype).items()}
    digests, bits = Digests(DEVICE), [(integers(a), integers(b)) for a, b in pairs.values()]
    found = delta_kernels.encode_all(bits, [digests.weights(new.shape) for _, new in pairs.values()])
    for (name, (old, new)), each in zip(pairs.items(), found, strict=True):
        expected = encode(old, new)
        assert (expected is None) == (each is None), name
        if each is not None and expected is not None:
            assert torch.equal(each[0], expected.codes), name
            assert torch.equal(each[1], expected.others), name
            assert int(each[2]) == int(digests.change(old, new)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_tensor_with_a_number_that_is_none_is_found(dtype: torch.dtype) -> None:
    tensors = [torch.full((300,), torch.finfo(dtype).max, dtype=dtype, device=DEVICE) for _ in range(5)]
    for tensor, place, value in zip(tensors[1:], (0, 299, 130), ("nan", "inf", "-inf"), strict=False):
        tensor[place] = float(value)
    assert delta_kernels.all_finite(tensors).tolist() == [True, False, False, False, True]
