"""Send each token to the experts that the engine chose for it, where the batch says which.

The router still computes the weights of these experts, so it is trained; only its choice is replaced. Without
this, rounding alone makes the router of the learner choose other experts than that of the engine for some
tokens, and pi / mu compares two different networks.
"""

import numpy as np
import torch
from torch import Tensor

from hpc_swe.base.errors import ProtocolError
from hpc_swe.base.records import FREE
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron.model.packing import Packing, upload


class Replay:
    """Replace the choice of one router.

    Megatron's own RouterReplay has one list for all models of a process, and cannot leave single tokens free.
    """

    def __init__(self) -> None:
        self.experts: Tensor | None = None
        """Of the next microbatch, uint8 [tokens, k]; None leaves all to the router."""

    def choose(self, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and indices [tokens, k] of the chosen experts, for `scores` [tokens, experts]."""
        values, own = scores.topk(k)
        if self.experts is None:
            return values, own
        chosen = torch.where(self.experts == FREE, own, self.experts.long())
        return scores.gather(1, chosen), chosen


def install(model: torch.nn.Module) -> None:
    """Make every layer of a model with experts take their choice from the packing of its microbatch.

    A layer that backward computes a second time does so again.
    """
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(_take_experts, with_kwargs=True)


def read(routing: bytes, shape: ModelShape, tokens: int, padding: int) -> Tensor:
    """Return the experts of a microbatch, uint8 [tokens + padding, layers, k].

    Raise ProtocolError if they are not those of `tokens` tokens in a model of this shape.
    """
    size = (tokens, shape.layers, shape.experts_per_token)
    if len(routing) != np.prod(size):
        raise ProtocolError(f"a routing has {len(routing)} bytes; the model needs tokens, layers, k = {size}")
    found = np.frombuffer(routing, np.uint8)
    if (found[found != FREE] >= shape.experts).any():
        raise ProtocolError(f"a routing names an expert beyond the model's {shape.experts}")
    padded = np.pad(found.reshape(size), ((0, padding), (0, 0), (0, 0)), constant_values=FREE)
    return upload(padded)


def _take_experts(layer: torch.nn.Module, _: object, given: dict[str, Packing]) -> None:
    experts, ranks = given["packed_seq_params"].experts, layer.mlp.attn_tp_group
    if experts is not None:
        experts = experts[:, layer.layer_number - 1].chunk(ranks.size())[ranks.rank()]
    layer.mlp.replay.experts = experts
