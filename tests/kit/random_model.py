"""Tiny models of the families that are trained, with random weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def save_random(
    folder: Path,
    family: str,
    sizes: Mapping[str, object],
    seed: int = 0,
    change: Callable[[str, Any], object] = lambda name, parameter: None,
    *,
    dtype: str = "float32",
) -> Path:
    """Save a model of a family such as Qwen3Moe, after `change` edited its parameters in place."""
    import torch
    import transformers

    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config(**sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            change(name, parameter)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
