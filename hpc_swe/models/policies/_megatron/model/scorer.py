"""Compute log-probabilities of packed tokens with the model, or with this rank's part of it."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from megatron.core.distributed import DistributedDataParallel
from numpy.typing import NDArray
from torch import Tensor

from hpc_swe.base.records import IdArray
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron.kernels.flash_attention import describe
from hpc_swe.models.policies._megatron.kernels.pipeline import Outputs, Pass, Stages
from hpc_swe.models.policies._megatron.model import packing, routing
from hpc_swe.models.policies._megatron.model.model import PolicyModel
from hpc_swe.models.policies._megatron.model.parallel import DTYPES, TorchRanks
from hpc_swe.models.policies._megatron.settings import MegatronSettings

log = logging.getLogger(__name__)


class Scorer:
    """Pack tokens and run the model on them; `stages` runs it for many microbatches, with backward."""

    def __init__(
        self,
        model: DistributedDataParallel | PolicyModel,
        shape: ModelShape,
        settings: MegatronSettings,
        ranks: TorchRanks,
    ) -> None:
        self._model, self._shape, self._settings, self._ranks = model, shape, settings, ranks
        rank, parts = ranks.context_group.rank(), settings.context_parallel
        self._packer = packing.Packer(
            shape, DTYPES[settings.dtype], settings.tensor_parallel, rank=rank, parts=parts
        )
        self.kernels = self._packer.kernels
        self.stages = Stages(model, settings.pipeline_parallel)
        if ranks.rank == 0:
            log.info("attention: %s", describe(self._packer.facts))

    def forward(
        self,
        ids: IdArray,
        lengths: Sequence[int],
        trained: NDArray[np.integer],
        experts: bytes = b"",
        longest: int = 0,
    ) -> Outputs:
        """Return log-probabilities and entropies of the `trained` positions of a microbatch."""
        tokens, packed = self._packer.pack(ids, lengths, trained)
        if longest:
            longest_part = self._packer.part_of(longest) // self._settings.tensor_parallel
            packed = replace(packed, longest=longest_part)
        if experts:
            group = self._ranks.context_group
            padding = tokens.shape[1] * group.size() - len(ids)
            chosen = routing.read(experts, self._shape, len(ids), padding)
            packed = replace(packed, experts=chosen.chunk(group.size())[group.rank()])
        found: Outputs = self._model(tokens, None, None, packed_seq_params=packed)
        return found

    def logprobs(self, token_ids: list[int], experts: bytes = b"") -> list[float]:
        """Return the log-probabilities of one sequence's tokens, without its first token, on all ranks."""
        ids, count = np.asarray(token_ids), len(token_ids)
        run = Pass(lambda each: self.forward(each, [count], np.arange(1, count), experts), keep_logprobs)
        found = self.stages.infer([ids], run)
        return self._ranks.broadcast_from_last_stage(
            [float(value) for each in found for value in each.tolist()]
        )


def keep_logprobs(_: object, outputs: Outputs) -> tuple[Tensor, Tensor]:
    """Finish a microbatch of which only the log-probabilities matter."""
    return outputs[0], outputs[0]
