"""The optimizer's state comes from a checkpoint in pieces."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402

from hpc_swe.plugins.policies._megatron.loaded import PIECES, SMALLEST, SavedTensor, divide  # noqa: E402


def saved(count):
    """A tensor of so many float32 values."""
    data = torch.empty(count, dtype=torch.float32, device="meta")
    return SavedTensor(None, None, "param", slice(0, count), ShardedTensor.from_rank_offsets("", data))


@pytest.mark.parametrize(
    ("counts", "most"),
    [
        ([2**20] * 320, 40 * 2**20),
        ([2**20] * 31 + [2**25] + [2**20] * 31, 2**27),  # a table of words is a piece of its own
        ([100] * 40, SMALLEST),
        ([], 0),
    ],
)
def test_host_memory_holds_a_small_part_of_the_state_at_a_time(counts, most):
    tensors = [saved(count) for count in counts]
    pieces = divide(tensors)
    assert sum(pieces, []) == tensors
    assert max((sum(each.nbytes for each in piece) for piece in pieces), default=0) <= most
    assert len(pieces) <= 2 * PIECES, "each piece takes all ranks a round of messages"
