"""Gradient buffers, AdamW and schedule, as Megatron runs them."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hpc_swe.plugins.policies._megatron import cpu
from hpc_swe.plugins.policies._megatron.spec import PolicyModel
from hpc_swe.plugins.policies.base import OptimizerConfig
from hpc_swe.plugins.policies.megatron import Megatron


def wrap(model: PolicyModel, settings: Megatron) -> DistributedDataParallel:
    """Give the model float32 gradient buffers, summed over data-parallel ranks."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.distributed_optimizer,
        average_in_collective=False,
    )
    return DistributedDataParallel(model.config, config, model)


def build_optimizer(
    ddp: DistributedDataParallel, settings: Megatron, config: OptimizerConfig
) -> MegatronOptimizer:
    """AdamW over the wrapped model; main parameters are float32."""
    megatron = MegatronConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=_lowest(config),
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=settings.dtype == "bfloat16",
        params_dtype=getattr(torch, settings.dtype),
        use_distributed_optimizer=settings.distributed_optimizer,
    )
    with cpu.as_cuda():
        return get_megatron_optimizer(megatron, [ddp])


def build_schedule(optimizer: MegatronOptimizer, config: OptimizerConfig) -> OptimizerParamScheduler:
    """Learning rate by step; it is also what exempts vectors from weight decay.

    It is advanced before each step: warm-up begins above 0, and the last step of a linear decay is
    still above 0, hence the 1 in both lengths.
    """
    linear = config.decay == "linear"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=_lowest(config),
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(config.decay_steps, config.warmup_steps) + 1,
        lr_decay_style="WSD" if linear else "constant",
        wsd_decay_steps=round(config.decay_steps * config.decay_share) + 1,
        lr_wsd_decay_style="linear",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # run.json is written once, so it wins over a checkpoint
    )


def _lowest(config: OptimizerConfig) -> float:
    return 0.0 if config.decay == "linear" else config.lr
