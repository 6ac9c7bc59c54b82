"""Compute a mixture of experts on torch alone; Megatron's own experts need packages built for CUDA."""

from collections import defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hpc_swe.models.policies._megatron.kernels.dispatch import (
    Collect,
    Route,
    Spread,
    SpreadWeights,
    TokenExchange,
)
from hpc_swe.models.policies._megatron.kernels.kernels import swiglu, weighted
from hpc_swe.models.policies._megatron.kernels.recompute import Call, keep
from hpc_swe.models.policies._megatron.model.layer import DecoderConfig
from hpc_swe.models.policies._megatron.model.parallel import TorchRanks
from hpc_swe.models.policies._megatron.model.routing import Replay

Adapt = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns the outputs of a grouped product, whose backward may then compute more; it takes them, the inputs,
and where the rows of each expert end."""


class ExpertLayer(MoELayer):  # type: ignore[misc]
    """Choose experts for each token, and add up what they return. Of Megatron's parts this has the router."""

    def __init__(
        self,
        config: DecoderConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        super(MoELayer, self).__init__(config, layer_number, groups)  # MoELayer's own needs a GPU
        self.router = submodules.router(config=config, pg_collection=groups)
        self.experts = build_module(submodules.experts, self.num_local_experts, config, pg_collection=groups)
        self.shared = SharedExpert(config, groups) if config.shared_ffn else None
        self._group, first = groups.tp_ep, self.local_expert_indices[0]
        self._mine = range(first, first + self.num_local_experts)
        self.replay = Replay()
        self.rows = 0
        """How many rows this rank's experts computed since `ExpertLoad.begin`."""

    def forward(self, tokens: Tensor, longest: int, cheap: Call = keep, costly: Call = keep) -> Tensor:
        """Return [tokens, 1, width] for [tokens, 1, width].

        No rank that shares experts with this one has more than `longest` tokens.
        """
        flat = tokens.flatten(0, -2)
        chosen, weights = self._choose(flat)
        route = Route(chosen, self._mine, TokenExchange(self._group, longest), self.config.num_moe_experts)
        found = self.experts(  # the rows have no name here, for they must be gone when the sums are made
            cheap(lambda each: _at_least_one(Spread.apply(each, route)), flat),
            route.ends,
            SpreadWeights.apply(weights, route),
            cheap,
            costly,
        )
        self.rows += len(route.rows)
        output: Tensor = Collect.apply(found, route).view_as(tokens)
        return output + self.shared(tokens, cheap, costly) if self.shared else output

    def _choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router.gating(tokens)
        if self.config.moe_router_pre_softmax:
            weights, chosen = self.replay.choose(scores.softmax(-1), self.config.moe_router_topk)
            return chosen, weights
        best, chosen = self.replay.choose(scores, self.config.moe_router_topk)
        return chosen, best.softmax(-1)


class SharedExpert(MegatronModule):  # type: ignore[misc]
    """Compute the expert that all tokens pass, times sigmoid of a gate; ranks divide it like a dense MLP."""

    def __init__(self, config: DecoderConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        linear = {"config": config, "is_expert": False, "bias": False, "tp_group": groups.tp}
        width, inner = config.hidden_size, config.shared_ffn
        self.linear_fc1 = ColumnParallelLinear(
            width,
            2 * inner,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.linear_fc2 = RowParallelLinear(
            inner,
            width,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )
        self.gate = torch.nn.Parameter(torch.empty(1, width, dtype=config.params_dtype))
        self.gate.sequence_parallel = config.sequence_parallel  # then each rank has a part of its gradient

    def forward(self, tokens: Tensor, cheap: Call = keep, costly: Call = keep) -> Tensor:
        """Return [tokens, 1, width] for [tokens, 1, width]."""
        product = cheap(swiglu, costly(lambda each: self.linear_fc1(each)[0], tokens))
        output, _ = self.linear_fc2(product)
        return output * F.linear(tokens, self.gate).sigmoid()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe the halves of the first matrix, which ranks divide one by one, so that others can load."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        key = f"{prefix}linear_fc1.weight"
        return state | {key: apply_swiglu_sharded_factory(state[key], sharded_offsets)}


class ExpertLoad:
    """Say how unevenly a batch's tokens are divided among the ranks that hold different experts."""

    def __init__(self, model: torch.nn.Module, ranks: TorchRanks) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, ExpertLayer)]
        self._ranks = ranks

    def begin(self) -> None:
        for layer in self._layers:
            layer.rows = 0

    def metrics(self) -> dict[str, float]:
        """Return the most rows of a rank in a layer, as a multiple of the mean; without experts, nothing."""
        if not self._layers:  # nor on any other rank
            return {}
        found = defaultdict[int, list[int]](list)
        for rows in self._ranks.gather({layer.layer_number: layer.rows for layer in self._layers}):
            for number, count in rows.items():
                found[number].append(count)
        loads = (max(counts) / fmean(counts) for counts in found.values() if any(counts))
        return {"policy/expert_load": max(loads, default=0.0)}


class Experts(MegatronModule):  # type: ignore[misc]
    """Compute all experts of this rank in two grouped products. Each expert is split like a dense MLP."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        self.groups = pg_collection
        self.adapt_gate_up: Adapt = _unadapted
        self.adapt_down: Adapt = _unadapted
        width, inner = config.hidden_size, config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self.gate_up = self._weight(num_local_experts, 2, inner, width)
        self.down = self._weight(num_local_experts, width, inner)

    def _weight(self, *shape: int) -> torch.nn.Parameter:
        device, dtype = torch.cuda.current_device(), self.config.params_dtype
        weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        # The gradient norm and the data-parallel reduction read these attributes.
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 2, 1
        weight.allreduce = self.config.expert_model_parallel_size == 1
        return weight

    def forward(
        self, rows: Tensor, ends: Tensor, weights: Tensor, cheap: Call = keep, costly: Call = keep
    ) -> Tensor:
        """Return this rank's part of the sum of all ranks' outputs, [rows, width].

        `rows` [rows, width] are sorted by expert, `ends` say where each expert's end, int32 [experts], and
        `weights` [rows] are the router's. Without weights there is one row of zeros, see `_at_least_one`.
        """
        count = len(weights)
        if not count:  # the row is cut off again, so its gradient is 0
            weights, ends = F.pad(weights, (0, 1)), ends + 1

        def gate_up(rows: Tensor) -> Tensor:
            return self.adapt_gate_up(
                F.grouped_mm(rows, self.gate_up.flatten(1, 2).mT, offs=ends), rows, ends
            )

        inner = cheap(weighted, cheap(swiglu, costly(gate_up, rows)), weights)
        return self.adapt_down(F.grouped_mm(inner, self.down.mT, offs=ends), inner, ends)[:count]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: object = None,
    ) -> dict[str, ShardedTensor]:
        """Describe the split for checkpoints: over experts, and each expert over tensor-parallel ranks."""
        groups, depth = self.groups, len(sharded_offsets)
        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                prefix + name,
                weight,
                *sharded_offsets,
                (depth, groups.ep.rank(), groups.ep.size()),
                (depth + 2, groups.expt_tp.rank(), groups.expt_tp.size()),
                replica_id=(0, 0, groups.expt_dp.rank()),
                prepend_axis_num=depth,
            )
            for name, weight in (("gate_up", self.gate_up), ("down", self.down))
        }


def _unadapted(outputs: Tensor, inputs: Tensor, ends: Tensor) -> Tensor:
    return outputs


def _at_least_one(rows: Tensor) -> Tensor:
    """Return the rows, or one of zeros where there is none: grouped products need a row.

    It belongs to what backward recomputes, which exchanges tokens: a rank without rows must do so, too.
    """
    return rows if len(rows) else F.pad(rows, (0, 0, 0, 1))
