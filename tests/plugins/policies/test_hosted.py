"""What of the optimizer's state goes to host memory, in which chunks, and when a node is too small for it."""

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

import torch  # noqa: E402

from hpc_swe.plugins.costs import GIB  # noqa: E402
from hpc_swe.plugins.policies._megatron import pinned  # noqa: E402
from hpc_swe.plugins.policies._megatron.hosted import Hosted, choose, divide  # noqa: E402
from hpc_swe.plugins.policies._megatron.pinned import MemoryClaim  # noqa: E402

SIZES = [[3000, 10, 5000], [7, 2000]]


@pytest.mark.parametrize(
    ("share", "chosen"),
    [
        (0.0, []),
        (0.3, [(0, 3000)]),
        (0.5, [(0, 5000), (1, 7)]),
        (0.9, [(0, 3000), (0, 5000), (0, 10), (1, 7)]),
        (1.0, [(0, 3000), (0, 10), (0, 5000), (1, 7), (1, 2000)]),
    ],
)
def test_share_is_filled_with_large_parameters_first_and_never_exceeded(share, chosen):
    groups = [{"params": [torch.empty(size) for size in group]} for group in SIZES]
    found = [(group, param.numel()) for group, param in choose(groups, share)]
    assert sorted(found) == sorted(chosen)
    assert [group for group, _ in found] == sorted(group for group, _ in found)


def test_chunks_have_every_element_once_and_cut_only_at_multiples():
    hosted = [
        Hosted(0, torch.empty(5000), 0),
        Hosted(0, torch.empty(10), 5120),
        Hosted(1, torch.empty(7), 6144),
    ]
    chunks = divide(hosted, 2000)
    places = [
        (chunk.group, [(piece.of.first + piece.start, piece.of.first + piece.end) for piece in chunk.pieces])
        for chunk in chunks
    ]
    assert places == [
        (0, [(0, 2048)]),
        (0, [(2048, 4096)]),
        (0, [(4096, 5000), (5120, 5130)]),
        (1, [(6144, 6151)]),
    ]
    assert [piece.place(chunks[2]) for piece in chunks[2].pieces] == [slice(0, 904), slice(1024, 1034)]


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ([("a", 5, 11), ("a", 5, 10), ("b", 10, 10)], None),
        ([("a", 5, 20, 3, 16), ("a", 5, 20, 3, 16)], None),
        (
            [("a", 5, 20, 3, 15), ("a", 5, 20, 3, 15)],
            "policy.key: the 2 processes of a need 10.0 GiB of host memory, of which 9.0 are free; "
            "choose less, or ask [executor] for more memory",
        ),
        (
            [("a", 5, 10), ("b", 6, 10), ("b", 6, 10)],
            "policy.key: the 2 processes of b need 12.0 GiB of host memory, of which 10.0 are free; "
            "choose less, or ask [executor] for more memory",
        ),
    ],
)
def test_processes_of_one_node_are_refused_more_than_it_has(claims, says):
    found = [MemoryClaim(node, *(size * GIB for size in sizes)) for node, *sizes in claims]
    assert pinned.refusal("policy.key", found, "choose less") == says


def test_job_can_have_what_is_available_and_no_more_than_slurm_gave():
    assert pinned.available("MemTotal: 99999999 kB\nMemAvailable:  8 kB\n") == 8 * 1024
    assert pinned.slurm_limit({"SLURM_MEM_PER_NODE": "2048"}) == 2 * GIB
    assert pinned.slurm_limit({"SLURM_MEM_PER_NODE": "0"}) == pinned.slurm_limit({}) > 1000 * GIB
    assert pinned.claim(7).free > 0, "this node's files can be read"
