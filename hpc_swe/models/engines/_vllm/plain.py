"""Say whether vLLM computes with a model's weights as they were loaded.

A model is left to vLLM's reload when anything else is derived from its weights: the list of layers below is
short on purpose, because a stale derived tensor would go unnoticed.
"""

from collections.abc import Iterable
from typing import Any

import torch

PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""Quantization methods that leave weights on a GPU as they were loaded."""
PLAIN_EXPERTS = {"TRITON", "BATCHED_TRITON"}
"""Kernels that compute experts from weights as they were loaded; others want halves swapped, or blocks."""
PLAIN_LAYERS = {"Attention"}
"""Layers whose processing after loading touches no weights of an unquantized model."""


def require_plain(model: torch.nn.Module) -> None:
    """Raise ValueError if a layer may derive other tensors from the weights that were loaded."""
    if derived := sorted(set(_derived(model))):
        raise ValueError(f"its weights are processed after loading by {', '.join(derived)}")


def _derived(model: torch.nn.Module) -> Iterable[str]:
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    judged = {id(method) for method in methods}  # those of experts are modules, too
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and (not _is_plain(method) or _is_on_cpu(module)):
            yield type(method).__name__
        is_plain = type(module).__name__ in PLAIN_LAYERS or id(module) in judged
        if hasattr(module, "process_weights_after_loading") and not is_plain:
            yield type(module).__name__


def _is_plain(method: Any) -> bool:
    """Return whether a method leaves weights on a GPU as and where they were loaded."""
    name = type(method).__name__
    if name != "UnquantizedFusedMoEMethod":
        return name in PLAIN_METHODS
    moves = method.moe.moe_parallel_config.enable_eplb  # balances experts by moving them to other places
    return method.unquantized_backend.name in PLAIN_EXPERTS and not moves


def _is_on_cpu(module: torch.nn.Module) -> bool:
    return any(parameter.device.type == "cpu" for parameter in module.parameters())
