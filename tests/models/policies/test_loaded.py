"""The optimizer's state comes from a checkpoint in pieces."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402

from hpc_swe.models.policies._megatron.state.loaded import PIECES, SMALLEST, SavedTensor, divide  # noqa: E402


def saved(count):
    """A tensor of so many float32 values."""
    data = torch.empty(count, dtype=torch.float32, device="meta")
    return SavedTensor(None, None, "param", slice(0, count), ShardedTensor.from_rank_offsets("", data))


@pytest.mark.parametrize(
    ("counts", "most"),
    [
        ([2**20] * 320, 40 * 2**20),
        ([2**20] * 31 + [2**25] + [2**20] * 31, 12 * 2**20),  # a table of words
        ([100] * 40, SMALLEST),
        ([], 0),
    ],
)
def test_host_memory_holds_a_small_part_of_the_state_at_a_time(counts, most):
    pieces = divide([saved(count) for count in counts])
    assert sum(each.nbytes for piece in pieces for each in piece) == 4 * sum(counts)
    assert max((sum(each.nbytes for each in piece) for piece in pieces), default=0) <= most
    assert len(pieces) <= 2 * PIECES, "each piece takes all ranks a round of messages"


def test_a_large_tensor_is_split_into_the_rows_that_a_rank_updates():
    whole = torch.arange(8 * 10 * 3).view(8 * 10, 3)
    rank = ShardedTensor.from_rank_offsets("", whole[20:30].to("meta"), (0, 2, 8))  # the third of eight
    wanted, updated = slice(7, 23), torch.full((16,), -1)
    for each in SavedTensor(None, None, "param", wanted, rank).split(2 * 3 * 8):
        start = each.saved.global_offset[0]
        rows = whole[start : start + each.saved.local_shape[0]].flatten()
        part = rows[each.part]
        assert each.nbytes <= 2 * 3 * 8
        assert (updated[each.first : each.first + len(part)] == -1).all(), "each value comes once"
        updated[each.first : each.first + len(part)] = part
    assert torch.equal(updated, whole[20:30].flatten()[wanted])
