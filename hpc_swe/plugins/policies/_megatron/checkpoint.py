"""Distributed checkpoints that any number of tensor- or data-parallel ranks can resume from."""

import re
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint import CheckpointException

from hpc_swe.errors import StorageError
from hpc_swe.plugins.policies._megatron import compat, cpu
from hpc_swe.plugins.policies._megatron.parallel import TorchRanks
from hpc_swe.plugins.policies._megatron.spec import PolicyModel
from hpc_swe.store import atomic, folders

CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


class Checkpointer:
    """Saves and loads weights, optimizer, schedule, step and the random state."""

    def __init__(
        self,
        ranks: TorchRanks,
        model: PolicyModel,
        optimizer: MegatronOptimizer,
        schedule: OptimizerParamScheduler,
    ) -> None:
        self._ranks, self._model, self._optimizer, self._schedule = ranks, model, optimizer, schedule

    def save(self, folder: Path, step: int) -> None:
        """Write into an empty folder; returns when all ranks are done."""
        with cpu.as_cuda():
            compat.prepare_state(self._optimizer)
            state = self._state(loading=False) | {"step": step, "random": torch.get_rng_state()}
            try:
                with compat.last_files() as failures:
                    dist_checkpointing.save(state, str(folder), content_metadata=CONTENT)
            except CheckpointException as error:  # on all ranks, whichever could not write
                refusal = self._ranks.broadcast(_refusal(folder, error) if self._ranks.rank == 0 else None)
                if refusal is None:
                    raise
                raise refusal from error
        for failure in self._ranks.broadcast(failures):
            with atomic.storage(folder):
                raise failure

    def load(self, folder: Path) -> int:
        """Resume; returns the step."""
        with cpu.as_cuda():
            compat.prepare_state(self._optimizer)
            state = dist_checkpointing.load(self._state(loading=True), str(folder))
            self._model.load_state_dict(state["model"], strict=True)
            self._optimizer.load_state_dict(state["optimizer"])
            compat.separate_steps(self._optimizer)
        self._schedule.num_steps = 0  # it adds what it loads
        self._schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
        return int(state["step"])

    def _state(self, *, loading: bool) -> dict[str, object]:
        content = CONTENT | {"dp_cp_group": self._ranks.data_group}
        model = self._model.sharded_state_dict(metadata=content)
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=loading, metadata=content)
        return {"model": model, "optimizer": optimizer, "schedule": self._schedule.state_dict()}


def _refusal(folder: Path, error: CheckpointException) -> StorageError | None:
    """What the file system said, or says when it is asked itself; only rank 0's error has the words."""
    for number in map(int, re.findall(r"\[Errno (\d+)\]", str(error))):
        if number in atomic.REFUSALS:  # though there may be room again
            return StorageError(f"{folder}: {atomic.REFUSALS[number]}")
    try:
        folders.require_room(folder)
    except StorageError as error:
        return error
    return None
