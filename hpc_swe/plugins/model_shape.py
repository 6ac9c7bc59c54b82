"""Read a model's shape from its config.json; without torch, so that a login node can estimate with it."""

import json
from dataclasses import dataclass
from pathlib import Path

from hpc_swe.errors import ConfigError

KNOWN = ("qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Parameters:
    """Count a model's parameters by how tensor parallelism divides them."""

    split: int
    """Parameters that the ranks divide."""
    whole: int
    """Parameters that every rank holds: norms and routers."""

    @property
    def total(self) -> int:
        """Return `sum(p.numel() for p in model.parameters())`."""
        return self.split + self.whole

    def of_rank(self, ranks: int) -> int:
        """Return the parameters on each of so many ranks."""
        return self.split // ranks + self.whole


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
    theta: float
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
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: cannot read {path}: {error}") from error
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        _refuse_unknown(path, config, rope)
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            groups=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            ffn=config["moe_intermediate_size" if experts else "intermediate_size"],
            vocab=config["vocab_size"],
            eps=config["rms_norm_eps"],
            theta=float(rope.get("rope_theta") or config["rope_theta"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=config["model_type"] == "qwen2" or bool(config.get("attention_bias")),
            qk_norm=config["model_type"] != "qwen2",
            experts=experts,
            experts_per_token=int(config.get("num_experts_per_tok") or 0),
            renormalize=bool(config.get("norm_topk_prob", False)),
        )

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
        split = self.layers * (attention + mlp) + tables
        return Parameters(split, whole=self.layers * norms + self.hidden)

    def check_parallel(self, tensor_parallel: int, sequence_parallel: bool) -> None:
        """Raise ConfigError, naming size or setting, for a layout that this model cannot be split into."""
        if self.experts and tensor_parallel > 1 and not sequence_parallel:
            raise ConfigError("[policy] a model with experts needs sequence_parallel = true")
        sizes = {"heads": self.heads, "groups": self.groups, "ffn": self.ffn, "vocab": self.vocab}
        for name, size in sizes.items():
            if size % tensor_parallel:
                raise ConfigError(
                    f"[policy] tensor_parallel = {tensor_parallel} does not divide the model's {name}, {size}"
                )


def _refuse_unknown(path: Path, config: dict[str, object], rope: object) -> None:
    kind = config.get("model_type")
    if kind not in KNOWN:
        raise ConfigError(f"model: {path} has model_type {kind!r}; supported: {', '.join(KNOWN)}")
    scaling = isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type") or "default")
    unsupported = {
        "rope scaling": scaling != "default",
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "hidden_act": config.get("hidden_act", "silu") != "silu",
    }
    if any(unsupported.values()):
        names = ", ".join(name for name, present in unsupported.items() if present)
        raise ConfigError(f"model: {path} sets {names}, which is not supported")
