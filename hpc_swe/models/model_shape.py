"""Read a model's shape from its config.json; without torch, so that a login node can estimate with it."""

import json
from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_swe.base.errors import ConfigError
from hpc_swe.models.rope import Rope

KNOWN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
)


OF_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok")


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

    @classmethod
    def read(cls, folder: Path) -> "ModelShape":
        """Read config.json as any version of transformers since 4.51 writes it.

        Raise ConfigError if the file is missing, or describes a model that is not supported.
        """
        path, config = folder / "config.json", read_config(folder)
        _refuse_unknown(path, config)
        experts = _experts(config)
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            groups=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            ffn=config["moe_intermediate_size" if experts else "intermediate_size"],
            vocab=config["vocab_size"],
            eps=config["rms_norm_eps"],
            rope=Rope.read(config, f"model: {path}"),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=config["model_type"] == "qwen2",
            qk_norm=config["model_type"] in ("qwen3", "qwen3_moe"),
            experts=experts,
            experts_per_token=int(config.get("num_experts_per_tok") or 0),
            renormalize=bool(config.get("norm_topk_prob", False)),
        )

    @property
    def routing_bytes(self) -> int:
        """Return the size of one token's routing: one byte for each layer and chosen expert."""
        return self.layers * self.experts_per_token if self.experts else 0

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the tensors in a Hugging Face folder, by name; a tied output has none."""
        width, heads, groups = self.hidden, self.heads * self.head_dim, self.groups * self.head_dim
        rows = {"q": heads, "k": groups, "v": groups}
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            "self_attn.o_proj.weight": (width, heads),
            **{f"self_attn.{name}_proj.weight": (count, width) for name, count in rows.items()},
        }
        if self.qkv_bias:
            layer |= {f"self_attn.{name}_proj.bias": (count,) for name, count in rows.items()}
        if self.qk_norm:
            layer |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        mlp = {"gate": (self.ffn, width), "up": (self.ffn, width), "down": (width, self.ffn)}
        if self.experts:
            layer["mlp.gate.weight"] = (self.experts, width)
        for place in [f"experts.{number}." for number in range(self.experts)] or [""]:
            layer |= {f"mlp.{place}{name}_proj.weight": size for name, size in mlp.items()}
        table = (self.vocab, width)
        return {
            "model.embed_tokens.weight": table,
            **{f"model.layers.{n}.{name}": size for n in range(self.layers) for name, size in layer.items()},
            "model.norm.weight": (width,),
            **({} if self.tied else {"lm_head.weight": table}),
        }

    @property
    def parameters(self) -> Parameters:
        """Count the parameters exactly, as the model is built.

        With h hidden, H and G heads and key-value heads times head_dim, and f the inner width, a layer has q,
        k, v and o of h (2 H + 2 G), their biases if any, an MLP of 3 h f or as many experts with a router of
        h, two norms of h, and norms of q and k of head_dim each. Around the layers are the embedding, the
        output unless it is tied, and the final norm.
        """
        heads, groups = self.heads * self.head_dim, self.groups * self.head_dim
        attention = self.hidden * (2 * heads + 2 * groups) + self.qkv_bias * (heads + 2 * groups)
        mlp = 3 * self.hidden * self.ffn * max(1, self.experts)
        norms = 2 * self.hidden + 2 * self.head_dim * self.qk_norm + self.hidden * self.experts
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        split, experts = (attention, mlp) if self.experts else (attention + mlp, 0)
        whole = self.layers * norms + self.hidden
        return Parameters(tables, self.layers * split, self.layers * experts, whole)


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
    """Return what config.json of a model says; raise ConfigError if it cannot be read."""
    return read_json(folder / "config.json")


def _experts(config: dict[str, Any]) -> int:
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _refuse_unknown(path: Path, config: dict[str, Any]) -> None:
    kind = config.get("model_type")
    if kind not in KNOWN:
        raise ConfigError(f"model: {path} has model_type {kind!r}; supported: {', '.join(KNOWN)}")
    needed = [*NEEDED, *(OF_EXPERTS if _experts(config) else ("intermediate_size",))]
    needed += ["head_dim"] if kind == "qwen3" else []  # transformers would take 128, whatever the tensors are
    if missing := [key for key in needed if config.get(key) is None]:
        raise ConfigError(f"model: {path} has no {', '.join(missing)}; add what the model was trained with")
    # transformers reads a mistral without this key as one that has a window
    window = config.get("sliding_window", 4096) if kind == "mistral" else config.get("use_sliding_window")
    unsupported = {
        "sliding_window" if kind == "mistral" else "use_sliding_window": bool(window),
        "layer_types": not {"full_attention"}.issuperset(config.get("layer_types") or ()),
        "attention_bias": bool(config.get("attention_bias")) and kind != "qwen2",
        "mlp_bias": bool(config.get("mlp_bias")),
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "quantization_config": bool(config.get("quantization_config")),
    }
    if any(unsupported.values()):
        names = ", ".join(name for name, present in unsupported.items() if present)
        raise ConfigError(f"model: {path} sets {names}, which is not supported")
