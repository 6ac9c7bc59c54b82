"""Time steps of transformers' Qwen3.5 under FSDP2 of one process, beside which the learner was measured.

python -m tests.bench.peer_hybrid SHAPE WAY:ROWSxLENGTH:RECOMPUTE[:ROWS AT A TIME]...

Each sequence is a row of its own and all rows are equally long, so nothing is padded. Masters, gradients and
moments are float32, and products bfloat16, as in our learner; the log-probabilities are computed by our
function, 2,048 tokens at a time, because float32 logits of all tokens would not fit. The ways: `plain` is
transformers with fla-core's rule and torch's convolution, its choice where causal-conv1d is missing;
`fla` has fla-core's convolution and gated norm, too; `compiled` also compiles the norms and the MLPs.
"""

import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from hpc_swe.base.records import float_array, id_array
from hpc_swe.models import shapes
from hpc_swe.models.costs import GIB
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron.model.logprobs import linear_logprobs
from hpc_swe.models.policies.base import LossConfig, OptimizerConfig, TrainedTokens
from hpc_swe.roles.learner.loss import PolicyObjective
from hpc_swe.view.benchmarks import flops
from hpc_swe.view.benchmarks.random_weights import RandomWeights
from hpc_swe.view.benchmarks.workload import Workload

GPU = torch.cuda.is_available()
ON = torch.device("cuda", 0) if GPU else torch.device("cpu")
STEPS = 2
CHUNK = 2048
recompute = "full"


def let_fla():
    """Let fla-core compute gradients of chunks that it refuses with this Triton: its tiles are right here."""
    from fla.ops.common import chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True


class Peer(nn.Module):
    """Compute log-probabilities and entropies of all tokens but the first of each row."""

    def __init__(self, model):
        super().__init__()
        self.inner, self._alone = model, dist.new_group([0])

    def forward(self, rows):
        hidden = self.inner.model(rows, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        return linear_logprobs(hidden, self.inner.lm_head.weight, rows[:, 1:].flatten(), self._alone, CHUNK)


def build(folder):
    shape, config = ModelShape.read(folder), AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    mesh = init_device_mesh(ON.type, (1,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    tensors = RandomWeights(shape, torch.bfloat16, ON)
    inner = model.model
    for number, layer in enumerate(inner.layers):
        fill(layer, f"model.layers.{number}.", tensors)
        whole = layer.forward

        def forward(*given, whole=whole, **named):
            if recompute == "full":
                return checkpoint(whole, *given, use_reentrant=False, **named)
            return whole(*given, **named)

        layer.forward = forward
        shard(layer)
    fill(inner.embed_tokens, "model.embed_tokens.", tensors)
    fill(inner.norm, "model.norm.", tensors)
    if config.tie_word_embeddings:
        model.lm_head.weight = inner.embed_tokens.weight
    else:
        fill(model.lm_head, "lm_head.", tensors)
    with ON:
        inner.rotary_emb = type(inner.rotary_emb)(config)
    peer = Peer(model)
    peer.train()
    shard(peer)
    return peer, shape


def fill(module, prefix, tensors):
    module.to_empty(device=ON)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(tensors[prefix + name])


def convolved(states, weight, bias=None, activation=None, **_):
    from fla.modules.causal_conv1d import causal_conv1d

    found, _ = causal_conv1d(states.transpose(1, 2), weight, bias, activation=activation)
    return found.transpose(1, 2)


def gated(self, hidden_states, gate):
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(
        hidden_states, gate, self.weight, None, activation="silu", eps=self.variance_epsilon
    )


KINDS = (modeling.Qwen3_5RMSNorm, modeling.Qwen3_5MLP)
PLAIN = modeling.causal_conv1d_fn, modeling.Qwen3_5RMSNormGated.forward, [each.forward for each in KINDS]


def use(way):
    is_fused = way in ("fla", "compiled") and GPU
    modeling.causal_conv1d_fn = convolved if is_fused else PLAIN[0]
    modeling.Qwen3_5RMSNormGated.forward = gated if is_fused else PLAIN[1]
    for kind, plain in zip(KINDS, PLAIN[2], strict=True):
        kind.forward = torch.compile(plain, dynamic=False) if way == "compiled" else plain


def step(peer, optimizer, objective, work, number, at_a_time):
    """Take one step, and return its loss and its gradient's norm."""
    (micro,) = work.batch(number, 0, 1).microbatches
    count, length = len(work.lengths), work.lengths[0]
    ids = torch.from_numpy(id_array(micro.token_ids).astype(np.int64)).view(count, length).to(ON)
    parts = [float_array(each).copy() for each in (micro.logprobs, micro.advantages, micro.weights)]
    parts = [torch.from_numpy(each).view(count, length)[:, 1:].to(ON) for each in parts]
    total = torch.zeros((), device=ON)
    for first in range(0, count, at_a_time):
        some = slice(first, first + at_a_time)
        logprobs, entropy = peer(ids[some])
        sampler, advantages, weights = (each[some].flatten() for each in parts)
        loss, _, _ = objective(TrainedTokens(logprobs, entropy, sampler, advantages, weights, None))
        loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(peer.parameters(), OptimizerConfig().clip_grad)
    optimizer.step()
    optimizer.zero_grad()
    return total.item(), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def optimizer_of(peer):
    wanted = OptimizerConfig()
    groups = [
        {"params": [each for each in peer.parameters() if each.dim() > 1]},
        {"params": [each for each in peer.parameters() if each.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=wanted.lr,
        betas=(wanted.beta1, wanted.beta2),
        eps=wanted.eps,
        weight_decay=wanted.weight_decay,
        fused=GPU or None,
    )


def measured(take, work, shape):
    """Take a step that compiles and two that count; return what is printed."""
    lengths = work.lengths
    loss, norm = take(0)
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for number in range(1, 1 + STEPS):
        take(number)
    mean, trained = (time.perf_counter() - start) / STEPS, int(work.mask(lengths).sum())
    share = 100 * flops.step_flops(shape, lengths, trained) / mean / (flops.datasheet_rate("H200") or 1)
    peak = torch.cuda.max_memory_allocated() / GIB if GPU else 0
    return (
        f"tokens/s {sum(lengths) / mean:,.0f}; MFU % {share:.1f}; step ms {1e3 * mean:,.0f}; "
        f"peak GiB {peak:.1f}; loss {loss:.5f}; grad norm {norm:.4g}"
    )


def main():
    global recompute
    name, *words = sys.argv[1:]
    if GPU:
        torch.cuda.set_device(0)
        let_fla()
    backend = "cpu:gloo,cuda:nccl" if GPU else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    peer, shape = build(shapes.find_or_write(name, Path(tempfile.mkdtemp())))
    optimizer, objective, last = optimizer_of(peer), PolicyObjective(LossConfig()), ""
    for word in words:
        way, size, recompute, at_a_time = (*word.split(":"), "")[:4]
        rows, length = (int(number) for number in size.split("x"))
        if way != last:
            use(way)
        last = way
        work = Workload(lengths=[length] * rows, mask_share=1.0, packs=1, vocab=shape.vocab)
        take = partial(step, peer, optimizer, objective, work, at_a_time=int(at_a_time or rows))
        try:
            print(word, measured(take, work, shape), flush=True)
        except torch.OutOfMemoryError as error:
            print(word, "out of memory", str(error)[:120], flush=True)
            optimizer.zero_grad()
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
