"""Read from config.json how a model turns positions into angles; without torch.

The names are those of Hugging Face's `rope_parameters`, which older files call `rope_scaling`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_swe.base.errors import ConfigError

KINDS = ("default", "llama3", "yarn")
NEEDED = {
    "default": ("rope_theta",),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("rope_theta",),
}
QUERY_BETA, ENGINE_KEY = "llama_4_scaling_beta", "llama_4_scaling"
"""How Ministral 3 scales queries: among rope_parameters, where transformers reads it, and where vLLM does."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Hold the parameters of rotary position embedding; a kind leaves those alone that it does not use."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    """How many times longer contexts may be than in pretraining."""
    original_length: int = 0
    """Longest context of pretraining."""
    low_freq_factor: float = 1.0
    """llama3: waves longer than `original_length` over this are stretched by `factor`."""
    high_freq_factor: float = 1.0
    """llama3: waves shorter than `original_length` over this stay as they are."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this within `original_length` stay as they are."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are stretched by `factor`."""
    truncate: bool = True
    """yarn: the bounds between which dimensions are stretched in part are rounded to whole dimensions."""
    attention_factor: float = 1.0
    """Factor of cosines and sines."""
    share: float = 1.0
    """Share of a head's dimensions that turn, the first ones; the others have no position."""

    query_beta: float = 0.0
    """Queries at position p count 1 + query_beta * log(1 + p // original_length) times."""

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> "Rope":
        """Read a parsed config.json; raise ConfigError that begins with `where` and names the key."""
        if config.get("rope_parameters") and config.get("rope_scaling"):
            one = cls.read({**config, "rope_scaling": None}, where)
            try:
                is_equal = one == cls.read({**config, "rope_parameters": None}, where)
            except ConfigError:
                is_equal = False
            if not is_equal:
                raise ConfigError(
                    f"{where} sets both rope_parameters and rope_scaling, which differ; keep one of them"
                )
            return one
        given = _given(config)
        outer = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
        found = outer | {key: value for key, value in given.items() if value is not None}
        kind = found.get("rope_type") or found.get("type") or "default"
        if kind not in KINDS:
            raise ConfigError(f"{where} sets rope_type {kind!r}; supported: {', '.join(KINDS)}")
        share = float(found.get("partial_rotary_factor") or 1)
        if share != 1 and kind != "default":
            raise ConfigError(f"{where} sets partial_rotary_factor with rope_type {kind!r}: not supported")
        missing = [key for key in NEEDED[kind] if found.get(key) is None]
        if missing:
            raise ConfigError(
                f"{where} has no {', '.join(missing)} for its rope_type {kind!r}; add what the model was "
                "trained with"
            )
        more = _scaling(where, kind, found, config) | _query_scaling(where, found, config)
        return cls(kind=kind, theta=float(found["rope_theta"]), share=share, **more)


def is_yarn(config: Mapping[str, Any]) -> bool:
    """Return whether a parsed config.json scales positions by YaRN."""
    return "yarn" in (_given(config).get("rope_type"), _given(config).get("type"))


def longest_context(config: Mapping[str, Any]) -> int:
    """Return how many positions a parsed config.json of any family is meant for; 0 if it does not say.

    Of YaRN, vLLM has the angles of `factor` times the original positions, and some of its releases serve no
    more than max_position_embeddings, so this is the smaller one.
    """
    positions, rope = config.get("max_position_embeddings", 0), _given(config)
    if not is_yarn(config):
        return int(positions)
    original = rope.get("original_max_position_embeddings") or positions
    scaled = int(original * (rope.get("factor") or 1))
    return min(int(positions) or scaled, scaled)


def _given(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _scaling(where: str, kind: str, found: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    if kind == "default":
        return {}
    most = config.get("max_position_embeddings")
    key = "original_max_position_embeddings"
    original = config.get(key) or found.get(key, most)
    if not original or not (most or found.get("factor")):
        raise ConfigError(
            f"{where} has no original_max_position_embeddings, or no factor, for its rope_type {kind!r}"
        )
    common = {"original_length": original, "factor": float(found.get("factor") or most / original)}
    if kind == "llama3":
        return common | {key: float(found[key]) for key in ("low_freq_factor", "high_freq_factor")}
    return common | {
        "beta_fast": float(found.get("beta_fast") or 32),
        "beta_slow": float(found.get("beta_slow") or 1),
        "truncate": bool(found.get("truncate", True)),
        "attention_factor": _attention_factor(found, common["factor"]),
    }


def _query_scaling(where: str, found: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("model_type") != "ministral3":
        return {}
    key = "original_max_position_embeddings"
    beta, length = found.get(QUERY_BETA), found.get(key)
    if beta is None or length is None or config.get(ENGINE_KEY) != {"beta": beta, key: length}:
        raise ConfigError(
            f"{where} must have rope_parameters.{QUERY_BETA} and {key}, which transformers reads, and "
            f"{ENGINE_KEY} = {{beta, {key}}} with the same numbers, which vLLM reads; "
            "`python -m hpc_swe.unpack_model` writes both, from a folder as it is published"
        )
    return {"query_beta": float(beta), "original_length": length}


def _attention_factor(found: Mapping[str, Any], factor: float) -> float:
    """Return YaRN's correction of the softmax's temperature. Source: Peng et al. 2023, arXiv 2309.00071."""

    def correction(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if found.get("attention_factor") is not None:
        return float(found["attention_factor"])
    if found.get("mscale") and found.get("mscale_all_dim"):
        return correction(found["mscale"]) / correction(found["mscale_all_dim"])
    return correction(1.0)
