"""Compute a layer of the decoder: attention and an MLP (or experts), each behind a norm."""

from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from hpc_swe.models.families import DeltaNet
from hpc_swe.models.policies._megatron.kernels.kernels import residual_norm, swiglu
from hpc_swe.models.policies._megatron.kernels.recompute import Call, Recomputing, keep
from hpc_swe.models.policies._megatron.model.packing import Packing


@dataclass
class DecoderConfig(TransformerConfig):  # type: ignore[misc]
    """Add to Megatron's configuration what it does not know."""

    recomputed: str = ""
    """What backward computes again: nothing, "elementwise" results, or also those of "products"."""
    delta: DeltaNet | None = None
    """Sizes of the layers that have no attention."""
    unrotated: frozenset[int] = frozenset()
    """As in `ModelShape`."""
    shared_ffn: int = 0
    """As in `ModelShape`."""
    residual_factor: float = 1.0
    """Factor of what attention and the MLP add to the hidden states."""


class Layer(TransformerLayer):  # type: ignore[misc]
    """Compute x + attention(norm(x)), and of this x + mlp(norm(x)).

    Written out, it shows which values backward needs: the results of `cheap` are elementwise, those of
    `costly` take a matrix product. What the core of attention returns is always kept.
    """

    def forward(self, hidden_states: Tensor, packed_seq_params: Packing, **_: object) -> tuple[Tensor, None]:
        """Return [tokens, 1, width] for [tokens, 1, width]."""
        with Recomputing() as recompute:
            cheap = recompute if self.config.recomputed else keep
            costly = recompute if self.config.recomputed == "products" else keep
            hidden, normed = cheap(partial(residual_norm, self.input_layernorm), hidden_states)
            context = self.self_attention.context(normed, packed_seq_params, cheap, costly)
            hidden = costly(self._attended, hidden, context)
            hidden, normed = cheap(partial(residual_norm, self.pre_mlp_layernorm), hidden)
            output = self._mlp(normed, packed_seq_params.longest, cheap, costly)
            return self._sum(hidden, output), None

    def _attended(self, hidden: Tensor, context: Tensor) -> Tensor:
        output, _ = self.self_attention.linear_proj(context)
        return self._sum(hidden, output)

    def _sum(self, hidden: Tensor, output: Tensor) -> Tensor:
        return torch.add(hidden, output, alpha=self.config.residual_factor)

    def _mlp(self, normed: Tensor, longest: int, cheap: Call, costly: Call) -> Tensor:
        if self.is_moe_layer:
            output: Tensor = self.mlp(normed, longest or len(normed), cheap, costly)
            return output
        product = cheap(swiglu, costly(self._gate_up, normed))
        output, _ = self.mlp.linear_fc2(product)
        return output

    def _gate_up(self, normed: Tensor) -> Tensor:
        both, _ = self.mlp.linear_fc1(normed)
        return both
