"""Run microbatches through the model: one by one, or through its stages by Megatron's 1F1B schedule."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from hpc_swe.models.policies._megatron.kernels.compat import cpu_as_cuda

T = TypeVar("T")
R = TypeVar("R")
Outputs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Pass:
    """Hold what is done with microbatches of type T, for results of type R."""

    forward: Callable[[Any], Outputs]
    """Call the model; except on the last stage its output is for the next stage."""
    finish: Callable[[Any, Outputs], tuple[Tensor, Any]]
    """Return the loss of a microbatch, for backward, and its result; the last stage calls it."""
    lap: Callable[[str], None] = lambda part: None
    """Is told when a forward or backward has ended."""


@dataclass(frozen=True)
class Stages:
    """Run passes over the part of the model on this rank."""

    _model: DistributedDataParallel
    _count: int

    def train(self, work: Sequence[Any], wanted: Pass) -> list[Any]:
        """Add up gradients, and return the results in order of `work`; [] except on the last stage."""
        if self._count > 1:
            return self._schedule(work, wanted, forward_only=False)
        results = []
        for each in work:
            loss, result = wanted.finish(each, wanted.forward(each))
            wanted.lap("step_seconds/forward")
            loss.backward()
            wanted.lap("step_seconds/backward")
            results.append(result)
        return results

    def infer(self, work: Sequence[Any], wanted: Pass) -> list[Any]:
        """Return the results in order of `work`, without gradients; [] except on the last stage."""
        with torch.no_grad():
            if self._count > 1:
                return self._schedule(work, wanted, forward_only=True)
            return [wanted.finish(each, wanted.forward(each))[1] for each in work]

    def _schedule(self, work: Sequence[Any], wanted: Pass, *, forward_only: bool) -> list[Any]:
        def step(queue: Iterator[Any], _: object) -> tuple[Outputs, Callable[[Outputs], tuple[Any, ...]]]:
            wanted.lap("step_seconds/backward")  # what came before this forward
            each = next(queue)
            outputs = wanted.forward(each)
            wanted.lap("step_seconds/forward")

            def finish(outputs: Outputs) -> tuple[Tensor, Tensor, Any]:
                loss, result = wanted.finish(each, outputs)
                wanted.lap("step_seconds/forward")
                return loss, torch.zeros((), dtype=torch.int), result

            return outputs, finish

        self._model.config.no_sync_func = self._model.no_sync
        with cpu_as_cuda():
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(work),
                model=[self._model],
                num_microbatches=len(work),
                seq_length=1,  # with variable_seq_lengths a stage tells the next one the shape
                micro_batch_size=1,
                forward_only=forward_only,
            )
        wanted.lap("step_seconds/backward")
        return results
