"""Split the ranks of a learner into groups: tensor, context, data and pipeline, from near to far."""

import os
from typing import TypeVar

import torch
from megatron.core import parallel_state, tensor_parallel

from hpc_swe.base.errors import ConfigError, NodeError
from hpc_swe.cluster import gpus
from hpc_swe.models import builds
from hpc_swe.models.policies._megatron.kernels import compat
from hpc_swe.models.policies._megatron.kernels.meeting import JoinedRanks
from hpc_swe.models.policies._megatron.settings import MegatronSettings

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchRanks(JoinedRanks):
    """Connect this process with those that train with it. Implements `Ranks` of models/policies/base.py."""

    def __init__(self, settings: MegatronSettings) -> None:
        _require_device(settings)
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size % settings.processes:
            raise ConfigError(
                "[policy] tensor_parallel * pipeline_parallel * context_parallel = "
                f"{settings.processes} does not divide the learner's {size} processes"
            )
        settings.check_processes(size // settings.processes)
        compat.apply()
        if torch.cuda.is_available():
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # lets reductions overlap with products
        _choose_kernels(deterministic=settings.deterministic)
        super().__init__()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.tensor_parallel,
            pipeline_model_parallel_size=settings.pipeline_parallel,
            context_parallel_size=settings.context_parallel,
            expert_model_parallel_size=settings.expert_parallel,
            # Experts that are divided among processes are whole there, so each product stays large.
            expert_tensor_parallel_size=1 if settings.expert_parallel > 1 else None,
            # A product that waits for free multiprocessors must not hold up an exchange beside it.
            high_priority_stream_groups=["tp"] if torch.cuda.is_available() else None,
        )
        # Dropout is 0 and weights come from files, so no CUDA random state is needed: use the no-op tracker.
        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.data_group = parallel_state.get_data_parallel_group()
        self.data_rank: int = self.data_group.rank()
        self.data_size: int = self.data_group.size()
        self.replica_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        """The ranks that hold the same part of the model, its experts left out."""
        self.context_group = parallel_state.get_context_parallel_group()
        self.expert_replica_group = parallel_state.get_expert_data_parallel_group()
        """The ranks that hold the same experts."""
        near = settings.tensor_parallel * settings.context_parallel
        self.shares_experts = near % settings.expert_parallel != 0
        """Whether ranks with other data, of other lengths, have experts of the same layers."""
        self.pipeline_size = settings.pipeline_parallel
        self.is_last_stage: bool = parallel_state.is_pipeline_last_stage()
        self._first_of_last_stage = self.size - self.size // settings.pipeline_parallel

    def broadcast_from_last_stage(self, value: T) -> T:
        """Return on every rank the value of the first rank that computes the loss."""
        return self.broadcast(value, self._first_of_last_stage)

    def close(self) -> None:
        parallel_state.destroy_model_parallel()
        super().close()


def device() -> torch.device:
    """Return the device of this process: its GPU, or the CPU where there is no CUDA."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _require_device(settings: MegatronSettings) -> None:
    """Raise NodeError, with the reason, where the configured GPU cannot be used: a CPU must not stand in."""
    if settings.gpus and not torch.cuda.is_available():
        builds.require(settings)
        visible = os.environ.get(gpus.VISIBLE, "not set")
        raise NodeError(
            f"policy.device = 'gpu', but torch {torch.__version__} finds no GPU on this node ({gpus.VISIBLE} "
            f"is {visible!r}); see what nvidia-smi says there, or set policy.device = 'cpu'"
        )


def _choose_kernels(*, deterministic: bool) -> None:
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads such memory
    torch.use_deterministic_algorithms(deterministic and torch.cuda.is_available())
