"""The kernels of deltas give what torch gives, bit for bit."""

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="tests/kit/install_triton.sh installs it")

from hpc_swe.plugins import delta_kernels  # noqa: E402
from hpc_swe.plugins.tensor_delta import Changes, Digests, Rectangle, encode, integers  # noqa: E402

BLOCK = delta_kernels.BLOCK = 128


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_differences_are_added_in_whatever_part_a_worker_holds(dtype: torch.dtype) -> None:
    encoded = {n: (a.to(DEVICE), b.to(DEVICE), encode(a, b)) for n, (a, b) in cases(dtype).items()}
    named = {n: (a, b, c.to(DEVICE)) for n, (a, b, c) in encoded.items() if c is not None}
    counts = [old.numel() for old, _, _ in named.values()]
    placed = delta_kernels.place_all([(c.codes, c.others) for _, _, c in named.values()], counts)
    for (name, (old, new, _)), each in zip(named.items(), placed, strict=True):
        at = Rectangle.whole(old.shape)
        rows, columns = slice(at.rows // 3, at.rows), slice(at.columns // 4, at.columns // 2)
        before, after = (integers(tensor).view(at.rows, at.columns) for tensor in (old, new))
        memory = before.new_zeros(at.rows + 1, at.columns + 3)
        part = memory[: rows.stop - rows.start, 1 : 1 + columns.stop - columns.start]
        part.copy_(before[rows, columns])
        expected = memory.clone()
        expected[: part.shape[0], 1 : 1 + part.shape[1]] = after[rows, columns]
        each.add(part, (rows.start, columns.start), at.columns)
        assert torch.equal(memory, expected), name
        whole = before.clone()
        each.add(whole, (0, 0), at.columns)
        assert torch.equal(whole, after), name
        across = before.t().clone(memory_format=torch.contiguous_format)
        each.add(across.t(), (0, 0), at.columns)
        assert torch.equal(across.t(), after), name


def test_changes_that_do_not_fit_are_refused_by_kernels() -> None:
    old, new = cases(torch.bfloat16)["some"]
    changes = encode(old, new)
    assert changes is not None
    wrong = [
        (Changes(changes.codes, changes.others[:-1]), old.numel()),
        (changes, old.numel() - BLOCK),
    ]
    for each, count in wrong:
        pair = each.to(DEVICE)
        with pytest.raises(ValueError, match=f"do not fit {count} elements"):
            delta_kernels.place_all([(pair.codes, pair.others)], [count])


def test_positions_beyond_two_to_the_31_are_reached() -> None:
    """Codes that skip most of a tensor, of which this worker holds the last values."""
    count = (1 << 31) + 1000
    codes = torch.full((count // 85 + 1,), 255, dtype=torch.uint8)
    codes[-1] = 85 + count % 85 - 1
    changes = (codes.to(DEVICE), torch.empty(0, dtype=torch.int16, device=DEVICE))
    delta_kernels.BLOCK = 1 << 20  # the interpreter takes long for each block
    [placed] = delta_kernels.place_all([changes], [count])
    values = torch.zeros(1, 10, dtype=torch.int16, device=DEVICE)
    placed.add(values, (0, count - 10), count)
    delta_kernels.BLOCK = BLOCK
    assert values.tolist() == [[0] * 9 + [-1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_tensor_with_a_number_that_is_none_is_found(dtype: torch.dtype) -> None:
    tensors = [torch.full((300,), torch.finfo(dtype).max, dtype=dtype, device=DEVICE) for _ in range(5)]
    for tensor, place, value in zip(tensors[1:], (0, 299, 130), ("nan", "inf", "-inf"), strict=False):
        tensor[place] = float(value)
    assert delta_kernels.all_finite(tensors).tolist() == [True, False, False, False, True]
