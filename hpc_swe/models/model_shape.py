"""Read a model's shape from its config.json; without torch, so that a login node can estimate with it."""

import json
import math
from codecs import BOM_UTF8
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_swe.base.errors import ConfigError
from hpc_swe.models.families import (
    DEFAULTS,
    GRANITE,
    MULTIPLIERS,
    WITH_DELTA_NETS,
    WITH_FUSED_MLP,
    WITH_FUSED_QKV,
    WITH_SHARED_EXPERTS,
    WRAPPED,
    DeltaNet,
    Multipliers,
    unrotated_layers,
)
from hpc_swe.models.rope import Rope, is_yarn

KNOWN = (
    "granite",
    "granitemoehybrid",
    "llama",
    "ministral3",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
)
UNPACK = "python -m hpc_swe.unpack_model MODEL --out NEW"
NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
)
OF_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok")
OF_SHARED_EXPERTS = "shared_expert_intermediate_size"
OF_DELTA_NETS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "layer_types",
    "head_dim",
)


@dataclass(frozen=True)
class Parameters:
    """Count a model's parameters by how tensor parallelism divides them."""

    tables: int
    """Parameters of the embedding and of the output, which ranks divide."""
    split: int
    """Parameters of attention and MLPs, which ranks divide."""
    experts: int
    """Parameters of experts, which ranks divide."""
    whole: int
    """Parameters that every rank holds: norms and routers."""

    @property
    def total(self) -> int:
        """Return `sum(p.numel() for p in model.parameters())`."""
        return self.tables + self.split + self.experts + self.whole

    def of_rank(self, ranks: int) -> int:
        """Return the parameters on each of so many tensor-parallel ranks."""
        return (self.tables + self.split + self.experts) // ranks + self.whole


@dataclass(frozen=True)
class ModelShape:
    """Hold everything that the architecture leaves open."""

    layers: int
    hidden: int
    heads: int
    groups: int
    """Number of heads of keys and values."""
    head_dim: int
    ffn: int
    """Inner width of an MLP; of one expert, when there are experts."""
    vocab: int
    eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: int
    """0 for a dense model."""
    experts_per_token: int
    renormalize: bool
    """True when the chosen experts' probabilities are scaled to sum to one."""
    shared_ffn: int = 0
    """Inner width of one more expert, which all tokens pass, behind a gate; 0 where there is none."""
    delta: DeltaNet | None = None
    """Set for a model with delta nets: its other layers have attention whose output is gated, and its norms
    multiply by one plus their weights."""
    prefix: str = "model."
    """Of the names of the text model's tensors, but for the head."""
    is_wrapped: bool = False
    """Whether the folder also has a model of images, which is not trained."""
    multipliers: Multipliers = Multipliers()
    unrotated: frozenset[int] = frozenset()
    """Layers, counted from 0, whose attention does not see positions."""
    fused_mlp: tuple[str, str] | None = None
    """Names of the gate and up projections, if they are one tensor in files, and of the down projection."""
    has_fused_qkv: bool = False
    """Whether the projections of queries, keys and values are one tensor in files."""
    has_fused_experts: bool = False
    """Whether all experts of a layer are two tensors in files, as `as_stored` finds out."""

    @classmethod
    def read(cls, folder: Path) -> "ModelShape":
        """Read config.json as any version of transformers since 4.51 writes it.

        Raise ConfigError if the file is missing, or describes a model that is not supported.
        """
        path, config = folder / "config.json", read_config(folder)
        _refuse_unknown(path, config)
        experts, is_wrapped = _experts(config), config["model_type"] in WRAPPED
        rope = Rope.read(config, f"model: {path}")
        if (rope.share != 1) != has_delta_nets(config):
            raise ConfigError(
                f"model: {path} has a partial_rotary_factor of {rope.share:g} for model_type "
                f"{config['model_type']!r}, which is not supported"
            )
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            groups=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            ffn=config[_ffn_keys(config)[0]],
            vocab=config["vocab_size"],
            eps=config["rms_norm_eps"],
            rope=rope,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=_has_qkv_bias(config),
            qk_norm=config["model_type"].startswith("qwen3"),
            experts=experts,
            experts_per_token=int(config.get("num_experts_per_tok") or 0) if experts else 0,
            renormalize=bool(config.get("norm_topk_prob", False)),
            shared_ffn=config[OF_SHARED_EXPERTS] if config["model_type"] in WITH_SHARED_EXPERTS else 0,
            delta=_delta_net(config),
            prefix="model.language_model." if is_wrapped else "model.",
            is_wrapped=is_wrapped,
            multipliers=Multipliers.read(config),
            unrotated=unrotated_layers(config),
            fused_mlp=WITH_FUSED_MLP.get(config["model_type"]),
            has_fused_qkv=config["model_type"] in WITH_FUSED_QKV,
        )

    def as_stored(self, names: Container[str]) -> "ModelShape":
        """Return the shape with the form of experts that a folder has whose tensors have these names.

        Qwen3.5-MoE is published with all experts of a layer in one tensor, Qwen3-MoE with each of them apart,
        and both may be saved otherwise.
        """
        fused = f"{self.prefix}layers.0.mlp.experts.gate_up_proj"
        return replace(self, has_fused_experts=self.experts > 0 and fused in names)

    @property
    def attention_layers(self) -> int:
        """Return how many layers have attention."""
        return self.layers - (len(self.delta.layers) if self.delta else 0)

    @property
    def routing_bytes(self) -> int:
        """Return the size of one token's routing: one byte for each layer and chosen expert."""
        return self.layers * self.experts_per_token if self.experts else 0

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the tensors in a Hugging Face folder, by name; a tied output has none."""
        common, attention, table = (
            self._common_tensors(),
            self._attention_tensors(),
            (self.vocab, self.hidden),
        )
        found = {f"{self.prefix}embed_tokens.weight": table, f"{self.prefix}norm.weight": (self.hidden,)}
        for layer in range(self.layers):
            is_delta = self.delta is not None and layer in self.delta.layers
            own = self.delta.tensors(self.hidden) if self.delta and is_delta else attention
            found |= {f"{self.prefix}layers.{layer}.{name}": size for name, size in (common | own).items()}
        return found | ({} if self.tied else {"lm_head.weight": table})

    def _common_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return those that each layer has: norms and the MLP."""
        names = ("input_layernorm", "post_attention_layernorm")
        layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (self.hidden,) for name in names}
        if self.fused_mlp:
            gate_up, down = (f"{name}.weight" for name in self.fused_mlp)
            return layer | {gate_up: (2 * self.ffn, self.hidden), down: (self.hidden, self.ffn)}
        widths = {f"experts.{number}.": self.ffn for number in range(self.experts)} or {"": self.ffn}
        if self.experts:
            layer["mlp.gate.weight"] = (self.experts, self.hidden)
        if self.has_fused_experts:
            layer["mlp.experts.gate_up_proj"] = (self.experts, 2 * self.ffn, self.hidden)
            layer["mlp.experts.down_proj"] = (self.experts, self.hidden, self.ffn)
            widths = {}
        if self.shared_ffn:
            layer["mlp.shared_expert_gate.weight"] = (1, self.hidden)
            widths["shared_expert."] = self.shared_ffn
        for place, width in widths.items():
            layer |= {f"mlp.{place}{name}_proj.weight": (width, self.hidden) for name in ("gate", "up")}
            layer[f"mlp.{place}down_proj.weight"] = (self.hidden, width)
        return layer

    def _attention_tensors(self) -> dict[str, tuple[int, ...]]:
        width, heads, groups = self.hidden, self.heads * self.head_dim, self.groups * self.head_dim
        rows = {"q": heads * (2 if self.delta else 1), "k": groups, "v": groups}
        rows = {"qkv": sum(rows.values())} if self.has_fused_qkv else rows
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.o_proj.weight": (width, heads),
            **{f"self_attn.{name}_proj.weight": (count, width) for name, count in rows.items()},
        }
        if self.qkv_bias:
            layer |= {f"self_attn.{name}_proj.bias": (count,) for name, count in rows.items()}
        if self.qk_norm:
            layer |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        return layer

    @property
    def parameters(self) -> Parameters:
        """Count the parameters exactly, as the model is built.

        With h hidden, H and G heads and key-value heads times head_dim, and f the inner width, a layer has q,
        k, v and o of h (2 H + 2 G), their biases if any, an MLP of 3 h f or as many experts with a router of
        h, two norms of h, and norms of q and k of head_dim each. A gated output adds h H, and a shared expert
        3 h f of its own f, and h for its gate. A delta net has the tensors that `DeltaNet` lists. Around the
        layers are the embedding, the output unless it is tied, and the final norm.
        """
        heads, groups = self.heads * self.head_dim, self.groups * self.head_dim
        gates = heads if self.delta else 0
        attention = self.hidden * (2 * heads + 2 * groups + gates) + self.qkv_bias * (heads + 2 * groups)
        attention, norms = attention * self.attention_layers, self.attention_layers * 2 * self.head_dim
        whole = self.layers * (2 * self.hidden + self.hidden * self.experts) + self.hidden
        whole += norms * self.qk_norm + self.layers * self.hidden * bool(self.shared_ffn)
        if self.delta:
            norms = self.delta.value_dim * len(self.delta.layers)
            sizes = self.delta.tensors(self.hidden).values()
            attention += sum(map(math.prod, sizes)) * len(self.delta.layers) - norms
            whole += norms
        mlp = 3 * self.hidden * self.ffn * max(1, self.experts) * self.layers
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        attention += 3 * self.hidden * self.shared_ffn * self.layers
        split, experts = (attention, mlp) if self.experts else (attention + mlp, 0)
        return Parameters(tables, split, experts, whole)


def refuse_mark(path: Path) -> None:
    """Raise ConfigError if a file begins as some editors begin it: vLLM and transformers do not read that."""
    with path.open("rb") as file:
        if file.read(len(BOM_UTF8)) == BOM_UTF8:
            raise ConfigError(f"{path} begins with a byte order mark (BOM); save it as UTF-8 without one")


def read_json(path: Path) -> dict[str, Any]:
    """Return what a JSON file of a model's folder says; raise ConfigError if it cannot be read."""
    try:
        refuse_mark(path)
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; copy it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no object of keys; copy it again")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """Return what config.json of a model says, and `DEFAULTS`; raise ConfigError if it cannot be read.

    What it says of the text model of a wrapped one stands beside the rest, in place of equal keys.
    """
    config = read_json(folder / "config.json")
    config = {**DEFAULTS.get(str(config.get("model_type")), {}), **config}
    inner = config.get("text_config")
    if config.get("model_type") not in WRAPPED or not isinstance(inner, dict):
        return config
    kind, of_text = config["model_type"], inner.get("model_type")
    if of_text not in (None, f"{kind}_text"):
        raise ConfigError(
            f"model: {folder / 'config.json'} has model_type {kind!r} and text_config.model_type {of_text!r} "
            f"and would be read as {kind}_text: copy the model again, or set both as it was published"
        )
    ties = [each["tie_word_embeddings"] for each in (config, inner) if "tie_word_embeddings" in each]
    if len(set(ties)) == 2:
        raise ConfigError(
            f"model: {folder / 'config.json'} sets tie_word_embeddings and text_config.tie_word_embeddings, "
            "which differ; keep the one that the model was trained with"
        )
    return config | inner | {"model_type": config["model_type"]}


def _delta_net(config: dict[str, Any]) -> DeltaNet | None:
    if not has_delta_nets(config):
        return None
    kinds = config["layer_types"]
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    return DeltaNet(layers, *(config[key] for key in OF_DELTA_NETS[:5]))


def has_delta_nets(config: Mapping[str, Any]) -> bool:
    """Return whether some layers of a model have gated delta nets in place of attention."""
    return config.get("model_type") in WITH_DELTA_NETS


def _has_qkv_bias(config: dict[str, Any]) -> bool:
    is_optional = config["model_type"] == "seed_oss"
    return config["model_type"] == "qwen2" or (is_optional and bool(config["attention_bias"]))


def _experts(config: dict[str, Any]) -> int:
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _ffn_keys(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the keys of MLPs, that of their inner width first."""
    if config["model_type"] == "granitemoehybrid":
        return ("shared_intermediate_size", "num_local_experts", "layer_types")
    return OF_EXPERTS if _experts(config) else ("intermediate_size",)


def _refuse_unknown(path: Path, config: dict[str, Any]) -> None:
    kind = config.get("model_type")
    if kind not in KNOWN:
        more = f"; {UNPACK} writes its text model" * (kind == "mistral3")
        raise ConfigError(
            f"model: {path} has model_type {kind!r}; supported: {', '.join(KNOWN)}{more}; an evaluation may "
            "take others, and docs/your_model.md says how to add a family"
        )
    needed = [*(["text_config"] if kind in WRAPPED else []), *NEEDED, *_ffn_keys(config)]
    needed += ["head_dim"] if kind == "qwen3" else []  # transformers would take 128, whatever the tensors are
    needed += OF_DELTA_NETS if has_delta_nets(config) else ()
    needed += [OF_SHARED_EXPERTS, "num_experts"] if kind in WITH_SHARED_EXPERTS else []
    needed += MULTIPLIERS if kind in GRANITE else ()
    if missing := [key for key in needed if config.get(key) is None]:
        raise ConfigError(f"model: {path} has no {', '.join(missing)}; add what the model was trained with")
    window = "sliding_window" if kind in ("ministral3", "mistral", "phi3") else "use_sliding_window"
    is_hybrid = kind == "granitemoehybrid"
    unsupported = {
        window: bool(config.get(window)),
        "layer_types": not _has_known_layers(config),
        "attention_bias": bool(config.get("attention_bias")) and not _has_qkv_bias(config),
        "attention_out_bias": bool(config.get("attention_out_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "quantization_config": bool(config.get("quantization_config")),
        "num_local_experts": is_hybrid and _experts(config) > 0,
        "position_embedding_type": is_hybrid and config.get("position_embedding_type") != "rope",
        "rope_type 'yarn'": kind == "phi3" and is_yarn(config),  # transformers takes it for another one
    }
    if has_delta_nets(config):
        shared = "linear_num_value_heads that is no multiple of linear_num_key_heads"
        unsupported |= {
            shared: config["linear_num_value_heads"] % config["linear_num_key_heads"] != 0,
            "attn_output_gate": not config.get("attn_output_gate", True),
            "output_gate_type": config.get("output_gate_type", "silu") not in ("silu", "swish"),
            "layer_scale": bool(config.get("layer_scale")),
            "norm_topk_prob": kind in WITH_SHARED_EXPERTS and not config["norm_topk_prob"],
        }
    if any(unsupported.values()):
        names = ", ".join(name for name, present in unsupported.items() if present)
        more = f"; {UNPACK} unpacks FP8 numbers" * unsupported["quantization_config"]
        raise ConfigError(f"model: {path} sets {names}, which is not supported{more}")


def _has_known_layers(config: dict[str, Any]) -> bool:
    kinds = config.get("layer_types") or ()
    if not has_delta_nets(config):
        return {"full_attention", "attention"}.issuperset(kinds)
    are_known = {"full_attention", "linear_attention"}.issuperset(kinds)
    return are_known and len(kinds) == config["num_hidden_layers"]
