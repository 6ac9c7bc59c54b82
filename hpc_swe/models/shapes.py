"""List the shapes of published models, as the config.json of each says.

Benchmarks and the demo give them random weights: the time of a step depends on the shape alone.
"""

import json
from pathlib import Path

from hpc_swe.base.cli import suggestion
from hpc_swe.base.errors import ConfigError

COMMON: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "num_key_value_heads": 4,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": True,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
HYBRID_EXPERTS = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
TINY = {"head_dim": 32, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 4096}


def _sizes(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, object]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


SHAPES: dict[str, dict[str, object]] = {
    "tiny": COMMON | _sizes(64, 96, 3, 4) | TINY,
    "tiny-moe": COMMON
    | EXPERTS
    | _sizes(64, 96, 2, 4)
    | TINY
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "0.6B": COMMON | _sizes(1024, 3072, 28, 16) | {"tie_word_embeddings": True},
    "4B": COMMON | _sizes(2560, 9728, 36, 32) | {"tie_word_embeddings": True},
    "8B": COMMON | _sizes(4096, 12288, 36, 32),
    "14B": COMMON | _sizes(5120, 17408, 40, 40),
    "32B": COMMON | _sizes(5120, 25600, 64, 64),
    "3.5-4B": COMMON | _sizes(2560, 9216, 32, 16) | HYBRID,
    "3.5-9B": COMMON | _sizes(4096, 12288, 32, 16) | HYBRID | {"tie_word_embeddings": False},
    "3.5-35B-A3B": COMMON | _sizes(2048, 512, 40, 16) | HYBRID | HYBRID_EXPERTS,
    "30B-A3B": COMMON | _sizes(2048, 6144, 48, 32) | EXPERTS,
}
"""Name -> config.json; the sizes are those of Qwen3, or of text models of Qwen3.5, and `tiny` ones are for
machines without a GPU.

Those of 3.5-9B are of the model's card, and those of 3.5-35B-A3B of the script with which slime trains it.
"""


def find_or_write(name: str, folder: Path) -> Path:
    """Return a folder with a config.json: `name` if it is one, else `folder` with that of the shape `name`.

    A folder that is written has no weights and no tokenizer. Raise ConfigError for a wrong name.
    """
    if (Path(name) / "config.json").is_file():
        return Path(name)
    if name not in SHAPES:
        raise ConfigError(
            f"--shape {name!r} is none of {', '.join(SHAPES)}{suggestion(name, SHAPES)}, "
            "and no folder with a config.json"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    return folder
