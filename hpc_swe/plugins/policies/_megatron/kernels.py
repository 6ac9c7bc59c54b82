"""Compute the elementwise parts of a layer."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """Adapt torch's RMSNorm to the arguments with which Megatron builds norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # then each rank has a part of its gradient
