"""Defects of megatron-core 0.16.1 that show whenever Transformer Engine is absent, on CUDA as on CPU.

Each function mends one and says where it is; tests/policies/test_compat.py fails for each that
a newer version no longer needs.
"""

import logging
import os
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from megatron.core import __version__
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.moe import moe_utils
from torch import Tensor, nn

from hpc_swe.processes import die_with_parent

TESTED = "0.16.1"

log = logging.getLogger(__name__)


def apply() -> None:
    """Mend what can be mended once and for all."""
    if __version__ != TESTED:
        log.warning("untested megatron-core %s; tested: %s", __version__, TESTED)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # moe_utils.py:1192 reads a name that a failed import left undefined
    # filesystem_async.py:55 starts a helper process for one answer: it imports the entry module again, takes
    # seconds, and outlives a rank that is killed. We save synchronously, so the answer stays in this process.
    filesystem_async._results_queue = queue.Queue()
    # filesystem_async.py:266 forks a writer, which would wait for ever for a word of a rank that was killed.
    os.register_at_fork(after_in_child=die_with_parent)
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_states


def mark_shards(model: nn.Module) -> None:
    """Mark the weights that are split over tensor-parallel ranks.

    With perform_initialization=False layers.py skips the marks, and the gradient norm then counts
    only rank 0's shard of every such weight.
    """
    for module in model.modules():
        if isinstance(module, (VocabParallelEmbedding, ColumnParallelLinear, RowParallelLinear)):
            for name, weight in module.named_parameters(recurse=False):
                if not hasattr(weight, "tensor_model_parallel"):
                    dim = 1 if isinstance(module, RowParallelLinear) and name == "weight" else 0
                    split = not isinstance(module, RowParallelLinear) or name == "weight"
                    set_tensor_model_parallel_attributes(weight, split, dim, 1)


def prepare_state(optimizer: MegatronOptimizer) -> None:
    """Give a fresh torch AdamW its state; distrib_optimizer.py:640 fails on one that never stepped."""
    for inner in optimizer.chained_optimizers:
        for group in inner.optimizer.param_groups:
            for param in group["params"]:
                if not inner.optimizer.state[param]:
                    inner.optimizer.state[param] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }


def separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its own step count after load_state_dict.

    distrib_optimizer.py hands all parameters one tensor, so that each step would count as many as
    there are parameters.
    """
    for inner in optimizer.chained_optimizers:
        for state in inner.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()


@contextmanager
def last_files() -> Iterator[list[OSError]]:
    """Collect what keeps rank 0 from writing .metadata and metadata.json, and let the save go on.

    state_dict_saver.py:243 and serialization.py:422 raise it there and then, on rank 0 alone, and the others
    wait in the next collective.
    """
    failures: list[OSError] = []

    def lenient(write: Callable[..., None]) -> Callable[..., None]:
        def attempt(*words: object) -> None:
            try:
                write(*words)
            except OSError as error:
                failures.append(error)

        return attempt

    writer = filesystem_async.FileSystemWriterAsync
    finish, save_config = writer.finish, serialization.save_config
    writer.finish, serialization.save_config = lenient(finish), lenient(save_config)
    try:
        yield failures
    finally:
        writer.finish, serialization.save_config = finish, save_config


def _set_states(self: DistributedOptimizer, model_param: nn.Parameter, tensors: dict[str, Tensor]) -> None:
    # distrib_optimizer.py:940 copies every key of the state, and torch AdamW's "step" is not in `tensors`
    group, order = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][order]
    with torch.no_grad():
        for key, value in {"param": main, **self.optimizer.state[main]}.items():
            if key in tensors:
                value.copy_(tensors[key])
