"""Say what some families of models compute otherwise than Llama, as their config.json describes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GRANITE = ("granite", "granitemoehybrid")
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
WITH_FUSED_MLP = ("granitemoehybrid",)
"""Types of models whose gate and up projections are one tensor; they have other names for it and its size."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"sliding_window": 4096},
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


def unrotated_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers, counted from 0, whose attention does not see positions; SmolLM3 has some."""
    if config["model_type"] != "smollm3":
        return frozenset()
    layers, interval = range(config["num_hidden_layers"]), config["no_rope_layer_interval"]
    are_rotated = config.get("no_rope_layers") or [(layer + 1) % interval for layer in layers]
    return frozenset(layer for layer in layers if not are_rotated[layer])
