"""Choose what backward recomputes from the memory that the GPUs of this job have."""

import logging

import torch
from msgspec.structs import replace

from hpc_swe.models.costs import GIB
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron import memory
from hpc_swe.models.policies._megatron.memory import MemoryNeeds
from hpc_swe.models.policies._megatron.model.parallel import TorchRanks
from hpc_swe.models.policies._megatron.settings import MegatronSettings

log = logging.getLogger(__name__)


def choose_recompute(
    settings: MegatronSettings, shape: ModelShape, ranks: TorchRanks, needs: MemoryNeeds
) -> MegatronSettings:
    """Return the settings with a value in place of recompute = "auto", the same on all ranks.

    The GPU with the least free memory decides. Call it before anything is on the GPUs; a CPU recomputes
    nothing, and where the length of microbatches is unknown backward recomputes all.
    """
    if settings.recompute != "auto":
        return settings
    if not settings.gpus:
        return replace(settings, recompute="none")
    if not needs.tokens:
        return replace(settings, recompute="full")
    free = min(ranks.gather(float(torch.cuda.mem_get_info()[0])))
    data_parallel = ranks.size // settings.processes
    level = memory.cheapest_recompute(shape, settings, data_parallel, needs, free)
    chosen = replace(settings, recompute=level)
    if ranks.rank == 0:
        peak = memory.peak_bytes(shape, chosen, data_parallel, needs) / GIB
        log.info(
            "policy.recompute = auto: %s; the estimate for %d tokens is %.1f GiB, and %.1f GiB are free",
            level,
            needs.tokens,
            peak,
            free / GIB,
        )
    return chosen
