"""Tiny models, sequences to train on, and the same steps in transformers and plain torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import unwrap
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hpc_swe.base.records import FREE, MicroBatch, float_array, floats, id_array, ids
from tests.kit.random_model import save_random

VOCAB = 320
LENGTHS = (40, 24, 64, 32)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
HYBRID = {  # three layers of delta nets, and one of attention
    "head_dim": 16,
    "rms_norm_eps": 1e-3,  # with 1e-6 one rounding of a weight changes gradients by 2e-5 of their size
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
FUSED = {"hybrid-moe": "hybrid-fused", "moe": "moe-fused"}
"""Model whose experts are apart in files -> the same with all experts of a layer in one tensor."""
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SCALED = {"beta": 0.3, "original_max_position_embeddings": 16}
MINISTRAL = {
    "head_dim": 16,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
    "llama_4_scaling": SCALED,  # which vLLM reads
}
GRANITE4 = {
    "shared_intermediate_size": 96,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "layer_types": ["full_attention"] * 4,
    "mamba_n_heads": 16,
}
UNDISTURBED = {"attention_dropout": 0.0, "residual_dropout": 0.0}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.7,
}


def move(name: str, parameter: Tensor) -> None:
    """Move a parameter off the values with which it begins."""
    if parameter.dim() == 1:
        parameter.add_(0.1 * torch.randn_like(parameter))
    if name.endswith("A_log"):
        parameter.sub_(4)  # a state lasts for many tokens
    if name.endswith("conv1d.weight"):
        parameter.mul_(6)


def use_plain_torch() -> None:
    """Let transformers compute delta nets in torch, because kernels of fla-core round float32."""
    for kind in ("qwen3_5", "qwen3_5_moe"):
        modeling = import_module(f"transformers.models.{kind}.modeling_{kind}")
        modeling.torch_chunk_gated_delta_rule = unwrap(modeling.torch_chunk_gated_delta_rule)


def make_models(folder: Path) -> dict[str, Path]:
    """One folder a model, norms and biases moved off their initial 1 and 0."""
    families = {
        "dense": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
        "tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
        "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
        "llama": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
        "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None, "rope_parameters": YARN}),
        "ministral": ("Ministral3", NO_TOKENS | MINISTRAL),
        "hybrid": ("Qwen3_5", HYBRID | {"tie_word_embeddings": False}),
        "tied-hybrid": ("Qwen3_5", HYBRID | {"tie_word_embeddings": True}),
        "hybrid-moe": ("Qwen3_5Moe", HYBRID | EXPERTS | {"shared_expert_intermediate_size": 48}),
        "seed": ("SeedOss", NO_TOKENS | UNDISTURBED | {"head_dim": 16}),
        "granite": ("Granite", MULTIPLIERS | {"tie_word_embeddings": True}),
        "granite4": ("GraniteMoeHybrid", MULTIPLIERS | GRANITE4),
        "smollm3": ("SmolLM3", NO_TOKENS),
        "phi": ("Phi3", NO_TOKENS),
        "moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 8, "tie_word_embeddings": False}),
        "routed": ("Qwen3Moe", {**EXPERTS, "head_dim": 8, "tie_word_embeddings": False}),
    }
    for name, (family, more) in families.items():
        save_random(folder / name, family, SIZES | more, change=move)
        if name in FUSED:
            save_random(folder / FUSED[name], family, SIZES | more, change=move, fused=True)
        (folder / name / "tokenizer.json").write_text("{}")
        (folder / name / "chat_template.jinja").write_text("{{ messages }}")
    sharded = folder / "sharded"
    AutoModelForCausalLM.from_pretrained(folder / "tied").bfloat16().save_pretrained(
        sharded, max_shard_size="100KB"
    )
    return {path.name: path for path in folder.iterdir()}


def make_sequences(
    model: PreTrainedModel, seed: int = 7, lengths: Sequence[int] = LENGTHS, *, routed: int = 0
) -> list[MicroBatch]:
    """One sequence each; the sampler's log-probabilities are the model's and noise.

    They were sampled by experts drawn at random from the first `routed` ones; of all, a tenth of the tokens
    leave them free.
    """
    rng = np.random.default_rng(seed)
    sequences = []
    for length in lengths:
        tokens = rng.integers(0, VOCAB, length)
        mask = (rng.random(length) < 0.6).astype(np.uint8)
        mask[0] = 0
        routing = _draw_routing(length, routed) if routed else b""
        with torch.no_grad():
            known = score(model, torch.from_numpy(tokens), routing).cpu().numpy()
        noisy = (known + 0.3 * rng.standard_normal(length)) * mask
        sequences.append(
            MicroBatch(
                token_ids=ids(tokens.astype("<i4")),
                mask=mask.tobytes(),
                logprobs=floats(noisy.astype("<f4")),
                advantages=floats((rng.standard_normal(length) * mask).astype("<f4")),
                weights=floats((mask * rng.random(length) / 50).astype("<f4")),
                sequence_lengths=[length],
                routing=routing,
            )
        )
    return sequences


def _draw_routing(length: int, first: int) -> bytes:
    rng = np.random.default_rng(length)
    size = (length, SIZES["num_hidden_layers"], first)
    experts = rng.random(size).argsort(-1)[..., : EXPERTS["num_experts_per_tok"]].astype(np.uint8)
    if first == EXPERTS["num_experts"]:
        experts[rng.random(length) < 0.1] = FREE
    return experts.tobytes()


def _route(model: PreTrainedModel, routing: bytes, tokens: int) -> None:
    """Make the routers choose what a routing of one sequence says."""
    chosen = np.frombuffer(routing, np.uint8).reshape(tokens, len(model.model.layers), -1)
    experts = torch.from_numpy(chosen.astype(np.int64)).to(model.device)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.gate.forward = partial(_choose, layer.mlp.gate, experts[:, index])


def _choose(gate: torch.nn.Module, given: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    logits = hidden.reshape(len(given), -1) @ gate.weight.t()
    chosen = torch.where(given == FREE, logits.topk(gate.top_k).indices, given)
    weights = logits.gather(1, chosen).softmax(-1, dtype=torch.float32)
    return logits, weights.to(logits.dtype), chosen


def score(model: PreTrainedModel, tokens: Tensor, routing: bytes = b"") -> Tensor:
    """Log-probability of each token given those before; 0 for the first."""
    if routing:
        _route(model, routing, len(tokens))
    tokens = tokens.to(model.device)
    logits = model(tokens[None]).logits[0, :-1].float()
    chosen = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return torch.cat((chosen.new_zeros(1), chosen))


@dataclass
class Steps:
    """What the reference implementation did."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    """Of the first step, before clipping."""
    weights: dict[str, Tensor]


def sampler_ratio_with_kl(logp: Tensor, sampler: Tensor, advantages: Tensor, reference: Tensor) -> Tensor:
    """Written down apart from the product: clip 0.2 / 0.28, dual clip 3, coefficients 0.01 and 0.05."""
    ratio = torch.exp(logp - sampler)
    surrogate = torch.minimum(ratio * advantages, torch.clip(ratio, 0.8, 1.28) * advantages)
    surrogate = torch.where(advantages < 0, torch.maximum(surrogate, 3 * advantages), surrogate)
    difference = reference - logp
    k3 = ratio * (torch.exp(difference) - difference - 1)
    bounded = k3.detach() - 3 * difference.detach() * (logp - logp.detach())
    return -surrogate + 0.01 * (logp - sampler) ** 2 + 0.05 * torch.where(ratio > 3, bounded, k3)


def reference_steps(
    folder: Path, sequences: list[MicroBatch], steps: int, clip: float, device: str = "cpu"
) -> Steps:
    """AdamW on transformers: lr 1e-3, decay 1 on matrices only, betas 0.9 and 0.95."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    frozen = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 1.0},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    done = Steps([], [], {}, {})
    for step in range(steps):
        optimizer.zero_grad()
        done.losses.append(sum(_backward(model, frozen, sequence) for sequence in sequences))
        if step == 0:
            done.grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        done.norms.append(norm_of(p.grad for p in model.parameters()))
        norm = torch.tensor(done.norms[-1])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip or 1e9, norm)
        optimizer.step()
    done.weights = {name: p.data for name, p in model.named_parameters()}
    if "model.layers.0.mlp.experts.gate_up_proj" not in load_file(folder / "model.safetensors"):
        done.grads, done.weights = _split_experts(done.grads), _split_experts(done.weights)
    return done


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the norm of all tensors; torch's own one of 1e8 float32 values is 1 % too small on a CPU."""
    return math.hypot(*(torch.linalg.vector_norm(each, dtype=torch.float64).item() for each in tensors))


def _backward(model: PreTrainedModel, frozen: PreTrainedModel, sequence: MicroBatch) -> float:
    tokens = torch.from_numpy(id_array(sequence.token_ids).astype(np.int64))
    sampler, advantages, weights = (
        torch.from_numpy(float_array(data).copy()).to(model.device)
        for data in (sequence.logprobs, sequence.advantages, sequence.weights)
    )
    with torch.no_grad():
        reference = score(frozen, tokens)
    logp = score(model, tokens, sequence.routing)
    loss = (weights * sampler_ratio_with_kl(logp, sampler, advantages, reference)).sum()
    loss.backward()
    return loss.item()


def _split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers fuses experts in memory; most files keep them apart."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
            found[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = (
                zip(("gate", "up"), weight.chunk(2), strict=True)
                if kind == "gate_up_proj"
                else [("down", weight)]
            )
            found |= {f"{stem}.{expert}.{part}_proj.weight": half for part, half in parts}
    return found


def write_sequences(path: Path, sequences: list[MicroBatch]) -> str:
    """For `worker.py`; returns the path."""
    path.write_bytes(msgspec.msgpack.encode(sequences))
    return str(path)
