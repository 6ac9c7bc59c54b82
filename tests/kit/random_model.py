"""Tiny models of the families that are trained, with random weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpc_swe.models.engines.scripted import Scripted

VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip


def save_random(
    folder: Path,
    family: str,
    sizes: Mapping[str, object],
    seed: int = 0,
    change: Callable[[str, Any], object] = lambda name, parameter: None,
    *,
    dtype: str = "float32",
    fused: bool = False,
) -> Path:
    """Save a model of a family such as Qwen3Moe, after `change` edited its parameters in place.

    Experts of a layer are `fused` into one tensor, or apart.
    """
    import torch
    import transformers

    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config(**sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            change(name, parameter)
    model.to(getattr(torch, dtype)).save_pretrained(folder, save_original_format=not fused)
    return folder


def save_wrapped(
    folder: Path,
    family: str,
    text: Mapping[str, object],
    change: Callable[[str, Any], object],
    dtype: str = "float32",
) -> Path:
    """Save a model of text and images as it is published; a tensor beside them is in bfloat16."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    config = getattr(transformers, f"{family}Config")
    vision = VISION | {"out_hidden_size": text["hidden_size"]}
    config = config(text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            change(name, parameter)
    model.to(getattr(torch, dtype)).save_pretrained(folder, save_original_format=False)
    tensors = load_file(folder / "model.safetensors")
    more = {"mtp.norm.weight": torch.randn(64).bfloat16()}
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class AnyWeights(Scripted, frozen=True, kw_only=True):
    """Takes every version of any model, since its scores are of none."""

    def _require_probe(self, *_: object) -> None:
        """Compare nothing."""
