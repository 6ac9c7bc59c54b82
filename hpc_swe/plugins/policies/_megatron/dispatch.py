"""Bring tokens to their experts and back, without making the host wait for the GPU.

Megatron's dispatcher asks the GPU in every layer how many tokens each expert has, because it derives the
order from a map of tokens and experts. Here the router's choice gives it: each token has k rows among the
sorted ones, so all sizes are known, and both directions only read rows, which also adds in a fixed order.
"""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ExpertLayer(MoELayer):  # type: ignore[misc]
    """Compute experts as Megatron does, with our dispatcher where each process has a part of every expert."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config, submodules, layer_number, pg_collection)
        if config.expert_model_parallel_size == 1:
            place = self.num_local_experts, self.local_expert_indices, config
            groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
            self.token_dispatcher = Dispatcher(*place, groups)
            self.token_dispatcher.router = self.router

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        """Return [tokens, 1, width] for [tokens, 1, width]."""
        found: tuple[Tensor, None] = super().forward(tokens)
        self.token_dispatcher.probs = None  # its history would keep the learner alive after its end
        return found


class Dispatcher(MoEAllGatherTokenDispatcher):  # type: ignore[misc]
    """Sort the tokens of all tensor-parallel ranks by expert; each expert is split among these ranks."""

    router: torch.nn.Module

    def dispatch_preprocess(self, tokens: Tensor, _map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return [tokens, width], and the weights of each token's experts, [tokens, k]."""
        self.hidden_shape, self._dtype = tokens.shape, probs.dtype
        self._chosen = self.router.router_replay.chosen
        return tokens.flatten(0, -2), probs.gather(1, self._chosen)

    def token_dispatch(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of all tensor-parallel ranks, and their weights."""
        if self.tp_size == 1:
            return tokens, weights
        with torch.no_grad():
            self._chosen = gather_from_sequence_parallel_region(self._chosen, group=self.tp_ep_group)
        tokens, weights = (
            gather_from_sequence_parallel_region(each, group=self.tp_ep_group) for each in (tokens, weights)
        )
        return tokens, weights

    def dispatch_postprocess(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows sorted by expert; how many each expert has, int32 [experts]; and the rows' weights."""
        experts, order = self._chosen.flatten().sort(stable=True)
        numbers = torch.arange(self.config.num_moe_experts + 1, device=order.device)
        counts = torch.searchsorted(experts, numbers, out_int32=True).diff()
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        self._rows, self._places = order // weights.shape[1], places.view_as(weights)
        return Spread.apply(tokens, self._rows, self._places), counts, weights.flatten()[order]

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows."""
        found: Tensor = Collect.apply(rows, self._rows, self._places)
        return found

    def token_combine(self, tokens: Tensor) -> Tensor:
        """Add up the parts of all tensor-parallel ranks; return those of this rank's tokens."""
        if self.tp_size == 1:
            return tokens
        parts = tokens.to(self._dtype)
        return reduce_scatter_to_sequence_parallel_region(parts, group=self.tp_ep_group).to(tokens.dtype)


class Spread(torch.autograd.Function):  # type: ignore[misc]
    """Copy each token into the rows of its experts. `places` [tokens, k] is where token t went."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return tokens.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _collected(grad, *ctx.saved_tensors), None, None


class Collect(torch.autograd.Function):  # type: ignore[misc]
    """Add up the rows of each token. `rows` is the token of each row."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return _collected(values, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grad.index_select(0, rows), None, None


def _collected(values: Tensor, places: Tensor) -> Tensor:
    return values.index_select(0, places.flatten()).unflatten(0, places.shape).sum(1)
