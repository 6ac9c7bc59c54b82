"""How ranks find one another, and who else could reach them."""

import json

import pytest

from tests.kit.ranks import launcher

RANK = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from hpc_swe.models.policies._megatron.model.parallel import TorchRanks
from hpc_swe.models.policies._megatron.settings import MegatronSettings

ranks = TorchRanks(MegatronSettings(device="cpu", tensor_parallel=2))
total = torch.ones(1)
dist.all_reduce(total)
own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd != "0" and
       os.path.lexists(f"/proc/self/fd/{fd}")}
listening = []
for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in own:
            listening.append(words[1].rpartition(":")[0])
found = ranks.gather(sorted(listening))
ranks.close()
if ranks.rank == 0:
    Path(sys.argv[1]).write_text(json.dumps([total.item(), found]))
"""
EXPERTS = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from megatron.core import parallel_state
from hpc_swe.models.policies._megatron.model.parallel import TorchRanks
from hpc_swe.models.policies._megatron.settings import MegatronSettings

ranks = TorchRanks(MegatronSettings(device="cpu", **json.loads(sys.argv[2])))
group = parallel_state.get_expert_model_parallel_group()
data = [None] * group.size()
dist.all_gather_object(data, ranks.data_rank, group)
groups, said = ranks.gather(data), ranks.gather(ranks.shares_experts)
ranks.close()
if ranks.rank == 0:
    Path(sys.argv[1]).write_text(json.dumps([said, groups]))
"""
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # as /proc/net prints 127.0.0.1 and ::1


def addresses(tmp_path, one_node):
    script, out = tmp_path / "rank.py", tmp_path / "out.json"
    script.write_text(RANK)
    outputs = [child.communicate(timeout=600) for child in launcher.start(2, script, out, one_node=one_node)]
    assert out.exists(), outputs
    total, found = json.loads(out.read_text())
    assert total == 2.0
    return {address for each in found for address in each}


@pytest.mark.slow
def test_ranks_of_one_node_listen_on_the_loopback_only(tmp_path):
    assert addresses(tmp_path, one_node=True) <= LOOPBACK


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (6, {"context_parallel": 3, "expert_parallel": 2}),  # a group of experts reaches into other data
        (4, {"context_parallel": 2, "expert_parallel": 2}),
        (4, {"context_parallel": 2, "expert_parallel": 4}),
    ],
)
def test_ranks_know_whether_others_with_their_experts_have_other_data(tmp_path, size, settings):
    """They must compute as many tokens as one another, or they wait for one another for ever."""
    script, out = tmp_path / "rank.py", tmp_path / "out.json"
    script.write_text(EXPERTS)
    children = launcher.start(size, script, out, json.dumps(settings))
    outputs = [child.communicate(timeout=600) for child in children]
    assert out.exists(), outputs
    said, groups = json.loads(out.read_text())
    assert said == [any(len(set(group)) > 1 for group in groups)] * size


@pytest.mark.slow
def test_ranks_of_several_nodes_meet_at_the_first_one(tmp_path):
    assert addresses(tmp_path, one_node=False) - LOOPBACK
