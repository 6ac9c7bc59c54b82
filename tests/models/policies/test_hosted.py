"""What of the optimizer's state goes to host memory, in which chunks, and when a node is too small for it."""

import json

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

import torch  # noqa: E402

from hpc_swe.base.errors import ProtocolError  # noqa: E402
from hpc_swe.models.costs import GIB  # noqa: E402
from hpc_swe.models.policies._megatron.kernels import pinned  # noqa: E402
from hpc_swe.models.policies._megatron.kernels.pinned import HostRoom, MemoryClaim  # noqa: E402
from hpc_swe.models.policies._megatron.state.hosted import choose  # noqa: E402
from tests.kit.ranks import launcher  # noqa: E402

LIMITED = """
import json, resource, sys
from pathlib import Path
import torch
from hpc_swe.base.errors import NodeError
from hpc_swe.models.policies._megatron.kernels import pinned
from hpc_swe.models.policies._megatron.model.parallel import TorchRanks
from hpc_swe.models.policies._megatron.settings import MegatronSettings
from hpc_swe.models.policies._megatron.state.state import Reference

ranks = TorchRanks(MegatronSettings(device="cpu", tensor_parallel=2))
model = torch.nn.Linear(2**13, 2**13)  # twice 256 MiB to keep
size = int(pinned.take("key", 1024, ranks, "choose less").place([1024], torch.uint8).count_nonzero())
if ranks.rank == 1:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**29,) * 2)
said = []
for take in (lambda: pinned.take("key", 2**30, ranks, "choose less"), lambda: Reference(model, ranks)):
    try:
        take()
    except NodeError as error:
        said.append(str(error))
both = ranks.gather([size, said])
ranks.close()
if ranks.rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(both))
"""
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


def test_memory_is_measured_when_all_ranks_have_freed_theirs(monkeypatch):
    class WithOneThatIsSlow:
        rank = 0

        def gather(self, value):
            monkeypatch.setenv("SLURM_MEM_PER_NODE", "2048")  # the other rank has freed its room by now
            return [value]

    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1")
    assert pinned.take("key", 2**21, WithOneThatIsSlow(), "choose less").nbytes == 2**21


def test_a_room_gives_no_more_than_it_has():
    room = HostRoom("policy.key", torch.zeros(192, dtype=torch.uint8))
    assert room.place([], torch.float32).shape == torch.Size([])
    assert room.place([2, 8], torch.float32).shape == (2, 8)
    with pytest.raises(ProtocolError, match="policy.key: a tensor of 68 bytes .* 192 bytes .* 128 are taken"):
        room.place([17], torch.float32)


def test_places_are_read_before_the_user_of_their_values_writes_them():
    """Where there is a GPU, while the next places are on their way to it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 1 << (24 if device.type == "cuda" else 6)
    memory = torch.zeros(12 * size, dtype=torch.uint8)
    room = HostRoom("policy.key", memory.pin_memory() if device.type == "cuda" else memory)
    places = [room.place([size // 2], torch.bfloat16) for _ in range(12)]
    checks = []
    for version in range(3):
        values = room.ahead([places[first : first + 2] for first in range(0, 12, 2)], device)
        for first in range(0, 12, 2):
            for i, (found, place) in enumerate(zip(next(values), places[first:], strict=False), first):
                expected = version and version + i
                assert found.device.type == device.type
                checks.append((found == expected).all())  # and no wait until the end
                place.copy_(torch.full_like(found, version + 1 + i), non_blocking=True)
        assert next(values, None) is None
    assert all(checks)
    assert len(checks) == 36


def test_memory_that_one_rank_is_refused_ends_all_with_its_message(tmp_path):
    script, out = tmp_path / "rank.py", tmp_path / "out.json"
    script.write_text(LIMITED)
    launcher.launch(2, script, str(out), timeout_s=300)
    (taken, said), other = json.loads(out.read_text())
    assert [taken, said] == other
    assert taken == 0
    asked, reference = said
    assert asked.startswith("key: rank 1 of ")
    assert "1.0 GiB of host memory are refused" in asked
    assert asked.endswith("; choose less")
    assert reference.startswith("learner.loss.kl_coefficient: rank 1 of ")
    assert reference.endswith("; train without it (0)")
