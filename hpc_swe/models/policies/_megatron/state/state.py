"""Manage what training changes: gradients, optimizer and schedule, checkpoints, and the reference weights."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint import CheckpointException

from hpc_swe.base.errors import StorageError
from hpc_swe.base.store import atomic, folders
from hpc_swe.models.policies._megatron.kernels import compat, pinned
from hpc_swe.models.policies._megatron.model.model import PolicyModel
from hpc_swe.models.policies._megatron.model.parallel import DTYPES, TorchRanks
from hpc_swe.models.policies._megatron.settings import MegatronSettings
from hpc_swe.models.policies._megatron.state import gathered, hosted, loaded, saving
from hpc_swe.models.policies._megatron.state.checkpoint_files import CheckpointFiles
from hpc_swe.models.policies._megatron.weights.lora import Adapters
from hpc_swe.models.policies._megatron.weights.origins import Origin
from hpc_swe.models.policies._megatron.weights.tensor_writer import TensorWriter
from hpc_swe.models.policies.base import WRITERS, OptimizerConfig

KL = "learner.loss.kl_coefficient"
AHEAD = 1 << 29
"""Bytes that may wait to be written; gathered values are copied for that."""
CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


def wrap(model: PolicyModel) -> DistributedDataParallel:
    """Give the model float32 gradient buffers, which are summed over data-parallel ranks."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(model.config, config, model)


def build_optimizer(
    ddp: DistributedDataParallel, settings: MegatronSettings, config: OptimizerConfig, ranks: TorchRanks
) -> MegatronOptimizer:
    """Build AdamW for the wrapped model; it keeps float32 copies of bfloat16 parameters.

    Raise NodeError on all ranks if a node has too little memory for what the settings keep there.
    """
    megatron = MegatronConfig(
        lr=config.lr,
        min_lr=_final_lr(config),
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=settings.dtype == "bfloat16",
        params_dtype=DTYPES[settings.dtype],
        use_distributed_optimizer=True,
    )
    # distrib_optimizer.py:977 copies the state seven times on the host
    DistributedOptimizer.get_parameter_state_dp_zero = gathered.gather_states
    with compat.cpu_as_cuda():
        found = get_megatron_optimizer(megatron, [ddp])
    # Where ranks divide all that is trained, Megatron adds one of nothing, which has no state.
    optimizer = ChainedOptimizer([each for each in found.chained_optimizers if not each.is_stub_optimizer])
    compat.fuse_steps(optimizer)
    if settings.offload_optimizer:
        hosted.host_states(optimizer, settings.offload_optimizer, ranks)
    return optimizer


def clip(optimizer: MegatronOptimizer, norm: float) -> None:
    """Scale the gradients, whose norm over all ranks is `norm`, down to at most `clip_grad`."""
    for inner in optimizer.chained_optimizers:
        limit = inner.config.clip_grad
        if torch.cuda.is_available():  # the fused step divides them on its way
            divisor = max(1.0, (norm + 1e-6) / limit) if limit > 0 else 1.0
            inner.optimizer.grad_scale = torch.full((), divisor, device="cuda")
        elif limit > 0:
            clip_grad_by_total_norm_fp32(inner.get_parameters(), limit, norm)


def build_schedule(optimizer: MegatronOptimizer, config: OptimizerConfig) -> OptimizerParamScheduler:
    """Build the schedule of the learning rate, which also exempts vectors from weight decay.

    It advances before each step, so the warm-up begins above 0. The last step of a linear decay must be
    above 0, too, hence the 1 in both lengths.
    """
    linear = config.decay_share > 0
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=_final_lr(config),
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(config.steps, config.warmup_steps) + 1,
        lr_decay_style="WSD" if linear else "constant",
        wsd_decay_steps=round(config.steps * config.decay_share) + 1,
        lr_wsd_decay_style="linear",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # run.json overrides the checkpoint
    )


def _final_lr(config: OptimizerConfig) -> float:
    return 0.0 if config.decay_share else config.lr


class Reference:
    """Keep a copy of the model's current weights, to be swapped in later.

    It takes twice their size in host memory, and nothing on the device.
    """

    def __init__(self, model: PolicyModel, ranks: TorchRanks) -> None:
        """Copy the weights; raise NodeError on all ranks if the memory of a node is too small."""
        self._parameters = list(model.parameters())
        needed = 2 * pinned.room_for(parameter.nbytes for parameter in self._parameters)
        room = pinned.take(KL, needed, ranks, "train without it (0)")
        places = [[room.place(each.shape, each.dtype) for each in self._parameters] for _ in range(2)]
        self._reference, self._trained = places
        for parameter, place in zip(self._parameters, self._reference, strict=True):
            place.copy_(parameter.data)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Load the reference weights into the model for the duration of the block."""
        lists = (self._parameters, self._reference, self._trained)
        for parameter, reference, trained in zip(*lists, strict=True):
            trained.copy_(parameter.data)
            parameter.data.copy_(reference)
        try:
            yield
        finally:
            for parameter, _, trained in zip(*lists, strict=True):
                parameter.data.copy_(trained)


@dataclass(frozen=True)
class Checkpointer:
    """Save and load weights, optimizer, schedule, step and random state.

    Ranks of any layout can resume from a checkpoint.
    """

    _ranks: TorchRanks
    _model: PolicyModel
    _adapters: Adapters
    """Where the model has any, a checkpoint holds them and not the weights below them."""
    _optimizer: MegatronOptimizer
    _schedule: OptimizerParamScheduler
    _origins: Sequence[Origin]
    """Weights that no checkpoint holds, which must be the same when one is loaded."""

    def save(self, folder: Path, step: int) -> None:
        """Write a checkpoint into an empty folder; return, or raise StorageError, on all ranks together."""
        with compat.cpu_as_cuda(), saving.hiding_pinned_memory(), saving.leaving_out_values() as files:
            compat.prepare_state(self._optimizer)
            state = self._state(loading=False) | {"step": step, "random": torch.get_rng_state()}
            state |= {"adapters": self._adapters.identity}
            state |= {"origins": {each.role: dict(each.digests) for each in self._origins}}
            try:
                with saving.collect_metadata_errors() as failures:
                    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=WRITERS)
                    dist_checkpointing.save(state, str(folder), strategy, content_metadata=CONTENT)
            except CheckpointException as error:  # raised on all ranks, whichever failed to write
                refusal = self._ranks.broadcast(_refusal(folder, error) if self._ranks.rank == 0 else None)
                if refusal is None:
                    raise
                raise refusal from error
            failures += self._write_values(files)
        for failure in (failure for found in self._ranks.gather(failures) for failure in found):
            with atomic.storage(folder):
                raise failure

    def _write_values(self, files: CheckpointFiles) -> list[OSError]:
        """Write the values of all tensors; return why that failed on this rank, which alone knows it."""
        with TensorWriter(AHEAD) as writer:
            for optimizer in self._optimizer.chained_optimizers:
                gathered.write(optimizer, files, writer)
            files.write_own(writer)
            try:
                files.finish(writer)
            except OSError as error:
                return [error]
        return []

    def load(self, folder: Path) -> int:
        """Load a checkpoint, and return its step; raise ConfigError if it belongs to others."""
        with compat.cpu_as_cuda(), saving.hiding_pinned_memory():
            compat.prepare_state(self._optimizer)
            saved = dist_checkpointing.load_common_state_dict(str(folder))
            self._adapters.require(saved.get("adapters", {}), folder)
            for origin in self._origins if "origins" in saved else ():  # older releases saved none
                origin.require(saved["origins"], folder)
            wanted = self._state(loading=True)
            needed = self._take_needed(wanted["optimizer"])
            state = dist_checkpointing.load(wanted, str(folder))
            self._model.load_state_dict(state["model"], strict=not self._adapters)
            self._adapters.merge()
            self._load_optimizer(state["optimizer"])
            loaded.load(needed, folder, self._ranks)
            compat.separate_steps(self._optimizer)
        self._schedule.num_steps = 0  # loading adds to it
        self._schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
        return int(state["step"])

    def _state(self, *, loading: bool) -> dict[str, Any]:
        content = CONTENT | {"dp_cp_group": self._ranks.replica_group}
        if self._adapters:
            model: dict[str, object] = {**self._adapters.sharded_state()}
        else:
            model = self._model.sharded_state_dict(metadata=content)
        return {
            "model": model,
            "optimizer": self._optimizer_state(model, content, loading=loading),
            "schedule": self._schedule.state_dict(),
        }

    def _optimizer_state(
        self, model: dict[str, object], content: dict[str, object], *, loading: bool
    ) -> dict[Any, Any]:
        """Return the state of the optimizer, in the same form for any number of expert-parallel ranks.

        Experts that are divided among ranks have an optimizer of their own. Megatron would write the groups
        of both under other names than those of one, and could not read them at another number of ranks.
        """
        parts = [
            dict(each.sharded_state_dict(model, loading, metadata=content))
            for each in self._optimizer.chained_optimizers
        ]
        states = [part.pop("param_state", {}) for part in parts]
        own = states if loading else map(gathered.only_own, self._optimizer.chained_optimizers, states)
        saved = {n: {"param_state": state} for n, state in enumerate(own) if state}
        if len(parts) == 1:
            return {**parts[0], **saved.get(0, {})}
        groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
        return {**parts[0], "optimizer": {"param_groups": groups}, **saved}

    def _take_needed(self, state: dict[Any, Any]) -> list[loaded.SavedTensor]:
        """Remove what is loaded in pieces from `_optimizer_state`; return what this rank needs of it."""
        optimizers = self._optimizer.chained_optimizers
        parts = [state] if len(optimizers) == 1 else [state[index] for index in range(len(optimizers))]
        return [
            each
            for optimizer, part in zip(optimizers, parts, strict=True)
            for each in loaded.needed(optimizer, part.pop("param_state"))
        ]

    def _load_optimizer(self, state: dict[Any, Any]) -> None:
        """Load the groups and steps; one common record of groups serves all optimizers, in any layout."""
        record = state["optimizer"]
        groups = [
            each | {"is_expert_parallel": flag} for each in record["param_groups"] for flag in (False, True)
        ]
        for optimizer in self._optimizer.chained_optimizers:
            optimizer.load_state_dict({**state, "optimizer": {**record, "param_groups": groups}})


def _refusal(folder: Path, error: CheckpointException) -> StorageError | None:
    """Return the file system's error, if that is why the save failed; only rank 0's error has its text.

    When the text names none, check the room on the file system now.
    """
    for number in map(int, re.findall(r"\[Errno (\d+)\]", str(error))):
        if number in atomic.REFUSALS:  # even if there is room again
            return StorageError(f"{folder}: {atomic.REFUSALS[number]}")
    try:
        folders.require_room(folder)
    except StorageError as error:
        return error
    return None
