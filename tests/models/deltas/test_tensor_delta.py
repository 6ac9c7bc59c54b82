"""Deltas and digests of tensors: every bit comes back, and one wrong bit is noticed."""

import pytest
import torch

from hpc_swe.models.deltas.tensor_delta import Changes, Digests, Rectangle, encode, encode_all, integers

CPU = torch.device("cpu")


def changed(dtype: torch.dtype, count: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor, and one in which a share differs: mostly by one unit, sometimes by any bits."""
    torch.manual_seed(count)
    old = torch.randn(count).to(dtype)
    new = old.clone()
    bits, chosen = integers(new), torch.rand(count) < share
    total = int(chosen.sum())
    step = torch.where(
        torch.rand(total) < 0.8, torch.randint(0, 2, (total,)) * 2 - 1, torch.randint(-30000, 30000, (total,))
    )
    bits[chosen] += step.to(bits.dtype)
    return old, new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("count", "share"), [(70_001, 0.0), (70_001, 0.0001), (70_001, 0.02), (300, 1.0)])
def test_every_bit_comes_back(dtype: torch.dtype, count: int, share: float) -> None:
    old, new = changed(dtype, count, share)
    changes = encode(old, new)
    assert changes is not None
    found = old.clone()
    changes.apply(found)
    assert torch.equal(integers(found), integers(new))
    digests = Digests(CPU)
    assert digests.tensor(old) + digests.change(old, new) == digests.tensor(new)


def test_numbers_that_are_none_and_signed_zeros_come_back() -> None:
    old = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1.0] * 20, dtype=torch.bfloat16)
    new = torch.tensor([-0.0, 0.0, float("inf"), float("nan"), 1.0] * 20, dtype=torch.bfloat16)
    changes = encode(old, new)
    if changes is not None:
        changes.apply(old)
        assert torch.equal(integers(old), integers(new))


def test_a_step_of_an_optimizer_takes_under_three_hundredths_of_the_bytes() -> None:
    """Every value moves by the learning rate, the most that a step of Adam does after its first ones."""
    torch.manual_seed(0)
    master = torch.randn(1 << 20) * 0.02
    old = master.bfloat16()
    new = (master - 1e-6 * torch.sign(torch.randn_like(master))).bfloat16()
    changes = encode(old, new)
    assert changes is not None
    assert 0 < changes.nbytes < 0.03 * new.nbytes


def test_a_tensor_that_changed_all_over_is_written_whole() -> None:
    assert encode(torch.zeros(100), torch.rand(100) + 1) is None


def test_all_pairs_of_a_call_have_changes_and_a_growth() -> None:
    digests, pairs = Digests(CPU), [changed(torch.bfloat16, count, 0.1) for count in (5000, 1, 300)]
    pairs.append((torch.zeros(100), torch.rand(100) + 1))
    found, growths = encode_all(pairs, digests)
    assert [each is None for each in found] == [encode(*pair) is None for pair in pairs]
    before, after = (torch.stack([digests.tensor(pair[side]) for pair in pairs]) for side in (0, 1))
    assert torch.equal(before + growths, after)
    found, growths = encode_all([], digests)
    assert not found
    assert growths.dtype == torch.int64
    assert growths.shape == (0,)


def test_changes_that_do_not_fit_are_refused() -> None:
    old, new = changed(torch.bfloat16, 5000, 0.1)
    changes = encode(old, new)
    assert changes is not None
    with pytest.raises(ValueError, match="do not fit 4000 elements"):
        changes.apply(old[:4000])
    with pytest.raises(ValueError, match="do not fit 5000 elements"):
        Changes(changes.codes, changes.others[:-1]).apply(old)


def test_a_digest_adds_up_over_parts_and_notices_one_bit() -> None:
    digests, tensor = Digests(CPU), torch.randn(100, 64).bfloat16()
    parts = [Rectangle(row, column, 50, 16) for row in (0, 50) for column in range(0, 64, 16)]
    shares = [digests.part(tensor[p.row : p.row + 50, p.column : p.column + 16], p) for p in parts]
    whole = digests.tensor(tensor)
    assert sum(shares) == whole
    swapped = tensor.clone()
    swapped[3, 4], swapped[70, 9] = tensor[70, 9], tensor[3, 4]
    flipped = tensor.clone()
    integers(flipped)[99, 63] ^= 1
    assert len({int(digests.tensor(each)) for each in (tensor, swapped, flipped)}) == 3
