"""Say what some families of models compute otherwise than Llama, as their config.json describes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GRANITE = ("granite", "granitemoehybrid")
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
WITH_FUSED_MLP = {
    "granitemoehybrid": ("shared_mlp.input_linear", "shared_mlp.output_linear"),
    "phi3": ("mlp.gate_up_proj", "mlp.down_proj"),
}
"""Type of a model whose gate and up projections are one tensor -> names of it and of the down projection."""
WITH_FUSED_QKV = ("phi3",)
WITH_SHARED_EXPERTS = ("qwen3_5_moe", "qwen3_5_moe_text")
WITH_DELTA_NETS = ("qwen3_5", "qwen3_5_text", *WITH_SHARED_EXPERTS)
WRAPPED = ("qwen3_5", "qwen3_5_moe")
"""Types of models of text and images; the configuration of the text model is their text_config."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ministral3": {"head_dim": 128},
    "mistral": {"sliding_window": 4096},
    "qwen3_5_moe": {"norm_topk_prob": True},
    "qwen3_5_moe_text": {"norm_topk_prob": True},
    "seed_oss": {"attention_bias": True, "head_dim": 128},
    "smollm3": {"tie_word_embeddings": True, "no_rope_layer_interval": 4},
}
"""What transformers reads where a config.json lacks a key, by `model_type`."""


@dataclass(frozen=True)
class Multipliers:
    """Hold the factors of a Granite model; those of other models change nothing."""

    embedding: float = 1.0
    attention: float | None = None
    """Factor of the products of queries and keys; None for 1 / sqrt(head_dim)."""
    residual: float = 1.0
    """Factor of what attention and the MLP add to the hidden states."""
    logits: float = 1.0
    """Logits are divided by it."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Multipliers":
        """Read a parsed config.json, which has all `MULTIPLIERS` if it is of a Granite model."""
        if config["model_type"] not in GRANITE:
            return cls()
        return cls(*(float(config[key]) for key in MULTIPLIERS))


@dataclass(frozen=True)
class DeltaNet:
    """Hold the sizes of gated delta nets, which take the place of attention in some layers."""

    layers: frozenset[int]
    """Which layers, counted from 0."""
    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: as many value heads share the query and the key of one."""
    key_dim: int
    value_dim: int
    kernel: int
    """Number of tokens that the convolution sees."""

    @property
    def keys(self) -> int:
        """Return the width of all keys, which is that of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Return the width of queries, keys and values, which pass the convolution."""
        return 2 * self.keys + self.values

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the sizes of a layer's tensors, by name in a Hugging Face folder."""
        return {
            "linear_attn.in_proj_qkv.weight": (self.mixed, hidden),
            "linear_attn.in_proj_z.weight": (self.values, hidden),
            "linear_attn.in_proj_b.weight": (self.value_heads, hidden),
            "linear_attn.in_proj_a.weight": (self.value_heads, hidden),
            "linear_attn.conv1d.weight": (self.mixed, 1, self.kernel),
            "linear_attn.A_log": (self.value_heads,),
            "linear_attn.dt_bias": (self.value_heads,),
            "linear_attn.norm.weight": (self.value_dim,),
            "linear_attn.out_proj.weight": (hidden, self.values),
        }


def unrotated_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers, counted from 0, whose attention does not see positions; SmolLM3 has some."""
    if config["model_type"] != "smollm3":
        return frozenset()
    layers, interval = range(config["num_hidden_layers"]), config["no_rope_layer_interval"]
    are_rotated = config.get("no_rope_layers") or [(layer + 1) % interval for layer in layers]
    return frozenset(layer for layer in layers if not are_rotated[layer])
