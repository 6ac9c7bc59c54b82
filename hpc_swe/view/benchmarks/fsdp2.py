"""Train transformers' model under PyTorch's FSDP2, as one of the peers that peers.py describes."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from hpc_swe.base.records import Batch, MicroBatch, float_array, id_array
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron.kernels.flash_attention import Facts, Kernels, choose
from hpc_swe.models.policies._megatron.kernels.meeting import JoinedRanks
from hpc_swe.models.policies._megatron.model.logprobs import linear_logprobs
from hpc_swe.models.policies._megatron.stopwatch import Stopwatch
from hpc_swe.models.policies.base import Objective, OptimizerConfig, Tensors, TrainedTokens
from hpc_swe.view.benchmarks.peer_attention import PackedAttention
from hpc_swe.view.benchmarks.peers import PeerSettings

ATTENTION = "hpc_swe_packed"  # name in transformers' registry
CHUNK = 2048  # tokens whose logits exist at one time, as in our learner by default


class Fsdp2Trainer:
    """Take the steps of a peer; the ranks are all data-parallel."""

    def __init__(
        self,
        settings: PeerSettings,
        model: Path,
        dtype: torch.dtype,
        optimizer: OptimizerConfig,
        tensors: Tensors,
    ) -> None:
        """Build the model with weights from `tensors`; `dtype` is that of products and activations."""
        self.ranks = JoinedRanks()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.recompute, self.attention = settings.recompute, _kernels(settings, model, dtype)
        self._attention = PackedAttention(self.attention)
        AttentionInterface.register(ATTENTION, torch.compiler.disable(self._attention))
        self._settings = settings
        self._model = _shard(_build(model), settings, dtype, tensors, self._device)
        self._clip = optimizer.clip_grad
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self._model.parameters() if p.dim() > 1]},
                {"params": [p for p in self._model.parameters() if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=settings.fused_optimizer or None,
        )

    def train(self, batch: Batch, objective: Objective) -> dict[str, float]:
        watch = Stopwatch()
        results = []
        micros = list(self._microbatches(batch))
        for index, micro in enumerate(micros):
            self._model.set_requires_gradient_sync(index == len(micros) - 1)  # once a step, as our learner
            loss, sums, _ = objective(self._terms(micro))
            watch.lap("step_seconds/forward")
            (loss * self.ranks.size).backward()  # FSDP2 takes the mean over ranks, and ours is a sum
            watch.lap("step_seconds/backward")
            results.append(torch.cat((loss.detach().double()[None], sums)))
        totals = torch.stack(results).sum(0)
        dist.all_reduce(totals)
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        watch.lap("step_seconds/optimizer")
        metrics = {"policy/loss": totals[0].item(), "policy/grad_norm": float(norm.full_tensor())}
        return metrics | watch.read()

    def close(self) -> None:
        self.ranks.close()

    def _microbatches(self, batch: Batch) -> Iterator[MicroBatch]:
        for micro in batch.microbatches:
            yield from [micro] if self._settings.packed else _sequences(micro)

    def _terms(self, micro: MicroBatch) -> TrainedTokens:
        trained = np.flatnonzero(micro.mask_array)
        token_ids = self._upload(id_array(micro.token_ids).astype(np.int64))
        positions = np.concatenate([np.arange(length) for length in micro.sequence_lengths])
        rows = self._upload(trained - 1)
        self._attention.lengths = micro.sequence_lengths
        targets = token_ids[rows + 1]
        logprobs, entropy = self._model(token_ids[None], self._upload(positions)[None], rows, targets)
        arrays = (micro.logprobs, micro.advantages, micro.weights)
        sampler, advantages, weights = (self._upload(float_array(each)[trained]) for each in arrays)
        return TrainedTokens(logprobs, entropy, sampler, advantages, weights, None)

    def _upload(self, array: "np.ndarray[Any, Any]") -> Tensor:
        tensor = torch.from_numpy(array.copy())
        return (
            tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor
        )


class PeerModel(nn.Module):  # type: ignore[misc]
    """Compute log-probabilities and entropies [n], so that FSDP2 gathers the output layer with the model."""

    def __init__(self, model: nn.Module, *, fused: bool) -> None:
        super().__init__()
        self.inner, self._fused = model, fused
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        hidden = self.inner.model(token_ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        head = self.inner.lm_head
        if self._fused:
            found: tuple[Tensor, Tensor] = linear_logprobs(
                hidden.index_select(0, rows), head.weight, targets, self._alone, CHUNK
            )
            return found
        logs = head(hidden).float().log_softmax(-1)
        with torch.no_grad():
            entropy = torch.cat([-(part.exp() * part).sum(-1) for part in logs.split(CHUNK)])
        return logs[rows, targets], entropy[rows]


class Recomputed(nn.Module):  # type: ignore[misc]
    """Let backward compute a module again, instead of keeping what it needs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.module, hidden, use_reentrant=False)
        return output


def _kernels(settings: PeerSettings, folder: Path, dtype: torch.dtype) -> Kernels | Literal["flash"]:
    """Return the kernels of our learner, or flash attention; a CPU has neither."""
    kernels = choose(Facts.find(dtype, ModelShape.read(folder).head_dim))
    return kernels if settings.fast_attention or not torch.cuda.is_available() else "flash"


def _build(folder: Path) -> nn.Module:
    """Build the model without memory for its weights."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION)


def _shard(
    model: nn.Module, settings: PeerSettings, dtype: torch.dtype, tensors: Tensors, device: torch.device
) -> PeerModel:
    """Fill and shard one layer after another, so that no rank ever holds the whole model."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # one rank has nothing to gather again in backward, so it keeps what it has converted
    shard = partial(fully_shard, mesh=mesh, mp_policy=precision, reshard_after_forward=mesh.size() > 1)
    inner = model.model
    for number, layer in enumerate(inner.layers):
        _fill(layer, f"model.layers.{number}.", tensors, device)
        _set_up(layer, settings)
        shard(layer)
    _fill(inner.embed_tokens, "model.embed_tokens.", tensors, device)
    _fill(inner.norm, "model.norm.", tensors, device)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = inner.embed_tokens.weight
    else:
        _fill(model.lm_head, "lm_head.", tensors, device)
    with device:
        inner.rotary_emb = type(inner.rotary_emb)(model.config)
    peer = PeerModel(model, fused=settings.fused_head)
    peer.train()
    shard(peer)
    return peer


def _set_up(layer: nn.Module, settings: PeerSettings) -> None:
    """Compile a layer and let it compute again what the settings say."""
    if settings.recompute == "mlp":
        layer.mlp = Recomputed(
            layer.mlp
        )  # a module, because the compiler would compile a closure for each layer
    if settings.compiled:
        layer.forward = torch.compile(layer.forward, dynamic=False)
    if settings.recompute == "full":
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _fill(module: nn.Module, prefix: str, tensors: Tensors, device: torch.device) -> None:
    module.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_tensor(prefix + name, parameter, tensors))


def _tensor(name: str, parameter: Tensor, tensors: Tensors) -> Tensor:
    """Return a tensor of the files; transformers fuses those of experts in memory."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("gate_up_proj", "down_proj"):
        return tensors[name]
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    experts = range(parameter.shape[0])
    return torch.stack([torch.cat([tensors[f"{stem}.{n}.{p}.weight"] for p in parts]) for n in experts])


def _sequences(micro: MicroBatch) -> Iterator[MicroBatch]:
    """Yield each sequence of a pack as a microbatch."""
    ends = np.cumsum(micro.sequence_lengths).tolist()
    for length, end in zip(micro.sequence_lengths, ends, strict=True):
        tokens, numbers = slice(end - length, end), slice(4 * (end - length), 4 * end)
        yield MicroBatch(
            token_ids=micro.token_ids[numbers],
            mask=micro.mask[tokens],
            logprobs=micro.logprobs[numbers],
            advantages=micro.advantages[numbers],
            weights=micro.weights[numbers],
            sequence_lengths=[length],
        )
