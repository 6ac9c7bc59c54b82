"""The kernels of deltas give what torch gives, bit for bit."""

from itertools import pairwise

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="tests/kit/install_packages.sh installs it")

from hpc_swe.models.deltas import delta_kernels  # noqa: E402
from hpc_swe.models.deltas.tensor_delta import Changes, Digests, Rectangle, encode, integers  # noqa: E402

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
        "one by one": (flat[:1], stepped(flat[:1], [0])),
        "as many as blocks": (long[:256], stepped(long[:256], [3, 255])),
    }


def encoded(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[Changes | None, int]]:
    """What the kernels find, after a look at where they wrote it."""
    wholes = [Rectangle.whole(new.shape) for _, new in pairs]
    columns, weights = [at.columns for at in wholes], Digests(DEVICE).weights(wholes)
    found, growths = delta_kernels.encode_all(pairs, columns, weights)
    for parts in zip(*(each for each in found if each), strict=True):
        for dtype in {part.dtype for part in parts}:
            alike = [part for part in parts if part.dtype == dtype and len(part)]
            for left, right in pairwise(alike):
                assert left.data_ptr() + left.nbytes == right.data_ptr(), "one follows another"
    return [(each and Changes(*each), growth) for each, growth in zip(found, growths.tolist(), strict=True)]


def require_same(
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], found: list[tuple[Changes | None, int]]
) -> None:
    for (name, (old, new)), (changes, growth) in zip(pairs.items(), found, strict=True):
        expected = encode(old, new)
        assert (expected is None) == (changes is None), name
        if changes is not None and expected is not None:
            assert changes.others.dtype == expected.others.dtype, name
            assert torch.equal(changes.codes, expected.codes), name
            assert torch.equal(changes.others, expected.others), name
        assert growth == int(Digests(DEVICE).change(old, new)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_others_and_digests_are_those_of_torch(dtype: torch.dtype) -> None:
    pairs = {name: (a.to(DEVICE), b.to(DEVICE)) for name, (a, b) in cases(dtype).items()}
    require_same(pairs, encoded(list(pairs.values())))
    assert encode(*pairs["empty"]) is None
    assert dtype == torch.float32 or encode(*pairs["all by anything"]) is None


def test_tensors_of_all_widths_and_places_are_encoded_by_one_call() -> None:
    """In an order in which widths alternate; some begin at odd addresses, and some change entirely."""
    torch.manual_seed(1)
    pairs = {}
    for i in range(40):
        dtype = (torch.bfloat16, torch.float32, torch.bfloat16)[i % 3]
        count = int(torch.randint(1, 700, ()))
        memory = torch.randn(count + 1, device=DEVICE).to(dtype)
        old = memory[i % 2 : count + i % 2].view((-1, 1, count) if i % 4 else (count, 1))
        share = (0.0, 0.01, 0.3, 1.0)[i % 4]
        places = (torch.rand(count) < share).nonzero().view(-1).tolist()
        pairs[f"{i}"] = old, stepped(old, places)
    require_same(pairs, encoded(list(pairs.values())))


@pytest.mark.parametrize(
    ("row", "width"),
    [
        ((64, 1024, 4096, 128, 2), (2, True, True)),
        ((66, 1024, 4096, 128, 2), (2, False, True)),
        ((64, 1032, 4096, 128, 4), (4, False, True)),
        ((64, 1024, 4090, 4090, 4), (4, False, True)),
        ((64, 1024, 1 << 31, 1 << 31, 2), (2, True, False)),
    ],
)
def test_launches_know_what_holds_for_all_of_their_tensors(
    row: delta_kernels.Row, width: tuple[int, bool, bool]
) -> None:
    """A launch without these hints is slower, and one with wrong hints reads and divides wrongly."""
    good = [(0, 16, 32, 32, size) for size in (2, 4)]
    found = [(each.size, each.is_aligned, each.is_narrow) for each in delta_kernels._Width.all([*good, row])]
    assert found == sorted([width, (6 - width[0], True, True)])


@pytest.mark.parametrize("count", [256, 250])
def test_hints_that_addresses_and_counts_are_aligned_change_nothing(count: int) -> None:
    torch.manual_seed(2)
    old = torch.randn(8, count, device=DEVICE).to(torch.bfloat16)
    new = stepped(old, (torch.rand(old.numel()) < 0.05).nonzero().view(-1).tolist())
    pairs = {f"{i}": pair for i, pair in enumerate(zip(old, new, strict=True))}
    require_same(pairs, encoded(list(pairs.values())))
