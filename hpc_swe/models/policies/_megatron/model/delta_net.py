"""Compute a gated delta net, which takes the place of attention in most layers of a model.

Tensor-parallel ranks divide its heads. Each key head has several value heads, and all rows of the weights are
in the order of the key heads, so that a rank's part is one piece. Megatron's own layer refuses packed
sequences.
"""

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn

from hpc_swe.models.policies._megatron.kernels.delta_rule import Borders, convolved, delta_rule
from hpc_swe.models.policies._megatron.kernels.kernels import gated_norm
from hpc_swe.models.policies._megatron.kernels.recompute import Call
from hpc_swe.models.policies._megatron.model.layer import DecoderConfig
from hpc_swe.models.policies._megatron.model.packing import Packing

DIVIDED = ("convolution", "A_log", "dt_bias")
"""Parameters of which each tensor-parallel rank has the rows of its heads."""


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]
    """Apply the gated delta rule within each sequence of a packed microbatch."""

    def __init__(
        self, config: DecoderConfig, layer_number: int, pg_collection: ProcessGroupCollection, **_: object
    ) -> None:
        super().__init__(config=config)
        assert config.delta is not None
        self._sizes, self.tp_group = config.delta, pg_collection.tp
        self._groups = self._sizes.key_heads // self.tp_group.size()
        self._shared = self._sizes.value_heads // self._sizes.key_heads
        values = self._groups * self._shared
        linear = {"config": config, "is_expert": False, "bias": False, "tp_group": self.tp_group}
        self.linear_in = ColumnParallelLinear(
            config.hidden_size,
            self._sizes.mixed + self._sizes.values + 2 * self._sizes.value_heads,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.linear_proj = RowParallelLinear(
            self._sizes.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )
        new = partial(torch.empty, dtype=config.params_dtype)
        channels = self._sizes.mixed // self.tp_group.size()
        self.convolution = nn.Parameter(new(channels, 1, self._sizes.kernel))
        self.A_log, self.dt_bias = nn.Parameter(new(values)), nn.Parameter(new(values))
        self.norm = nn.Parameter(new(self._sizes.value_dim))
        for name in DIVIDED:
            set_tensor_model_parallel_attributes(getattr(self, name), True, 0, 1)

    def context(self, hidden: Tensor, packing: Packing, cheap: Call, costly: Call) -> Tensor:
        """Return what the output projection takes, [tokens, 1, value heads * d], for normed states."""
        return self._computed(packing.borders, cheap, costly(self._mixed, hidden))

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[object, ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """Describe the parameters to a distributed checkpoint, which any number of ranks can load."""
        own = dict(self.named_parameters(recurse=False))
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {})["dp_cp_group"]}
        state: dict[str, object] = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(DIVIDED, 0), sharded_offsets, **groups
        )
        for name, module in self.named_children():
            place = f"{prefix}{name}."
            state |= sharded_state_dict_default(
                module, place, sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state

    def _mixed(self, hidden: Tensor) -> Tensor:
        mixed, _ = self.linear_in(hidden)
        return mixed

    def _computed(self, borders: Borders, cheap: Call, mixed: Tensor) -> Tensor:
        """Read the states of all heads, and norm it, by a weight that the heads of all ranks share."""
        sizes, shared = self._sizes, self._shared
        parts = mixed.squeeze(1).unflatten(1, (self._groups, -1))
        values = shared * sizes.value_dim
        states, gate, rate, step = parts.split([2 * sizes.key_dim + values, values, shared, shared], 2)
        states = convolved(states.flatten(1), self.convolution, borders).unflatten(1, (self._groups, -1))
        query, key, value = states.split([sizes.key_dim, sizes.key_dim, values], 2)
        decay = -self.A_log.float().exp() * F.softplus(step.flatten(1).float() + self.dt_bias)
        by_head = (len(parts), -1, sizes.value_dim)
        read = delta_rule(query, key, value.reshape(by_head), decay, rate.flatten(1).sigmoid(), borders)
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.norm, group=self.tp_group)
        norm = partial(gated_norm, eps=self.config.layernorm_epsilon)
        normed: Tensor = cheap(norm, read, gate.reshape(by_head), weight)
        return normed.flatten(1).unsqueeze(1)
