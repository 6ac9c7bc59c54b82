"""Layers that exchange rows by copies, beside products, give the bits that Megatron's layers give."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from tests.kit.ranks import launcher  # noqa: E402

RANK = """
import itertools, json, mmap, sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import checkpoint, layers
from megatron.core.transformer.transformer_config import TransformerConfig
from hpc_swe.models.policies._megatron.kernels import compat, exchange, overlap
from hpc_swe.models.policies._megatron.model.parallel import TorchRanks
from hpc_swe.models.policies._megatron.kernels.recompute import Recomputing, keep
from hpc_swe.models.policies._megatron.settings import MegatronSettings

def add(inputs, grad, total):  # as CUDA does, for which a CPU has no kernel in bfloat16
    total.addmm_(grad.t().float(), inputs.float())

ranks = TorchRanks(MegatronSettings(device="cpu", tensor_parallel=RANKS))
layers._grad_accum_fusion_available = True
layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add)
overlap.add_product = add

class Files:  # in place of GPUs' memory
    def __init__(self, numbers, size, group):
        name, self.group = f"memory-{next(numbers)}-", group
        paths = [Path(sys.argv[1]).with_name(name + str(rank)) for rank in range(group.size())]
        paths[group.rank()].write_bytes(bytes(size))
        dist.barrier(group)
        self.all = []
        for path in paths:
            with path.open("r+b") as file:
                self.all.append(torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8))

    def barrier(self, channel, timeout_ms):
        dist.barrier(self.group)

    def get_buffer(self, rank, sizes, dtype):
        size = torch.Size(sizes).numel() * dtype.itemsize
        return self.all[rank][:size].view(dtype).view(sizes)

numbers = itertools.count()
refused = exchange.connect(ranks.tensor_group)  # a CPU has no such memory
exchange._connected[ranks.tensor_group] = exchange.RowExchange(
    ranks.tensor_group, lambda size, group: Files(numbers, size, group)
)

def build(dtype, column, row):
    torch.manual_seed(ranks.rank)
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, tensor_model_parallel_size=RANKS,
        params_dtype=dtype, sequence_parallel=True, bf16=dtype == torch.bfloat16, use_cpu_initialization=True,
        perform_initialization=False, gradient_accumulation_fusion=True,
    )
    same = {"config": config, "init_method": None}
    pairs = [
        (
            column(32, 64, bias=bias, **same),
            row(64, 32, bias=False, input_is_parallel=True, skip_bias_add=False, **same),
        )
        for bias in (True, False, True)
    ]
    overlap.install(torch.nn.ModuleList(itertools.chain(*pairs)), ranks.tensor_group)
    for parameter in parameters(pairs):
        parameter.data.copy_(torch.randn(parameter.shape) / 5)
        parameter.main_grad = torch.zeros(parameter.shape)
    return pairs

def parameters(pairs):
    return [each for pair in pairs for layer in pair for each in layer.parameters()]

def train(pairs, again):
    torch.manual_seed(7 + ranks.rank)
    found = []
    for _ in range(2):  # gradients of microbatches add up
        inputs = torch.randn(16, 1, 32).to(pairs[0][0].weight.dtype).requires_grad_()
        hidden = inputs
        for column, row in pairs:
            def layer(hidden, column=column, row=row, call=keep):
                return row(call(torch.nn.functional.silu, column(call(torch.sin, hidden))[0]))[0]
            with Recomputing() if again == "elementwise" else nullcontext(keep) as call:
                rest = checkpoint(layer, False, hidden) if again == "full" else layer(hidden, call=call)
            hidden = hidden + rest
        hidden.square().sum().backward()
        found += [hidden, inputs.grad]
    return found + [each.main_grad if each.dim() == 2 else each.grad for each in parameters(pairs)]

def off(mine, theirs):
    return float((mine - theirs).float().norm() / theirs.float().norm())

kinds = (
    (layers.ColumnParallelLinear, layers.RowParallelLinear),
    (overlap.GatheredLinear, overlap.ScatteredLinear),
)
said = []
with compat.cpu_as_cuda():
    for dtype in (torch.float32, torch.bfloat16):
        for again in ("none", "elementwise", "full"):
            wanted, found = (train(build(dtype, *kind), again) for kind in kinds)
            assert all(each.any() for each in wanted)
            said.append([off(mine, theirs) for mine, theirs in zip(found, wanted, strict=True)])
said = ranks.gather([refused is None, said])
ranks.close()
if ranks.rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(said))
"""


@pytest.mark.parametrize(("ranks", "float32", "bfloat16"), [(2, 0, 0), (4, 1e-6, 0.03)])
def test_exchanges_by_copies_change_nothing_but_rounding(tmp_path, ranks, float32, bfloat16):
    """Sums of two ranks have the same bits; of four, gloo rounds those of bfloat16 more often."""
    script, out = tmp_path / "rank.py", tmp_path / "out.json"
    script.write_text(RANK.replace("RANKS", str(ranks)))
    launcher.launch(ranks, script, out, timeout_s=300)
    for refused, of_rank in json.loads(out.read_text()):
        assert refused
        assert [len(case) for case in of_rank] == [12] * 6
        assert max(map(max, of_rank[:3])) <= float32
        assert max(map(max, of_rank[3:])) <= bfloat16
