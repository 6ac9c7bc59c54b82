"""Implement `Learner` with megatron-core: optimizer steps, log-probabilities, export, checkpoints.

The loss of a step is the sum over all tokens of all ranks of weight times term. Data-parallel ranks add up
their gradients. Nothing is divided, because the weights contain the denominator of the whole step.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from numpy.typing import NDArray
from torch import Tensor

from hpc_swe.errors import ConfigError, ProtocolError
from hpc_swe.plugins.model_shape import ModelShape
from hpc_swe.plugins.policies._megatron import export, packing, routing, state, weights
from hpc_swe.plugins.policies._megatron.compat import cpu_as_cuda
from hpc_swe.plugins.policies._megatron.model import build_model
from hpc_swe.plugins.policies._megatron.offload import Offload
from hpc_swe.plugins.policies._megatron.parallel import DTYPES, TorchRanks
from hpc_swe.plugins.policies._megatron.settings import MegatronSettings
from hpc_swe.plugins.policies.base import Carrier, Objective, OptimizerConfig, Tensors, TrainedTokens
from hpc_swe.records import Batch, IdArray, MicroBatch, TensorInfo, id_array

log = logging.getLogger(__name__)


class Stopwatch:
    """Measure seconds by part of a step; only `read` makes the host wait for the GPU."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, float | torch.cuda.Event]] = [("", _now())]

    def lap(self, part: str) -> None:
        """Count the time since the last lap as time of `part`."""
        self._marks.append((part, _now()))

    def read(self) -> dict[str, float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (_, start), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            passed = end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
            seconds[part] = seconds.get(part, 0.0) + passed
        return seconds


def _now() -> float | torch.cuda.Event:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class PreparedMicroBatch:
    """Hold a microbatch with the positions of its trained tokens, and log-probabilities that are fixed."""

    index: int
    micro: MicroBatch
    rows: NDArray[np.integer]
    reference: Tensor | None = None
    proximal: Tensor | None = None


Pass = tuple[Tensor, Tensor, Tensor, float, bool]
"""Loss of an optimizer step, sums and maxima of its statistics, norm of its gradient, and if it was taken."""


class MegatronLearner:
    """Train the part of the policy on this rank; `Learner` in plugins/policies/base.py is its contract."""

    def __init__(
        self,
        settings: MegatronSettings,
        model: Path,
        optimizer: OptimizerConfig,
        reference: Path | None,
        tensors: Tensors | None = None,
    ) -> None:
        """Load `tensors` into the model, or without them the files of the folder `model`."""
        shape = ModelShape.read(model)
        shape.check_parallel(settings.tensor_parallel, settings.sequence_parallel)
        self.ranks = TorchRanks(settings.tensor_parallel)
        self.tensor_parallel = settings.tensor_parallel
        self.vocabulary = shape.vocab
        self.tolerance = 1e-3 if settings.dtype == "float32" else 0.25
        self.step = 0
        self._shape, self._replays = shape, settings.replay_routing
        self._model = build_model(shape, settings)
        self._reference: state.Reference | None = None
        if reference is not None:
            weights.load(self._model, shape, weights.Snapshot(reference), self.ranks.tensor_group)
            self._reference = state.Reference(self._model)
        weights.load(self._model, shape, tensors or weights.Snapshot(model), self.ranks.tensor_group)
        self._ddp = state.wrap(self._model, settings)
        self._optimizer = state.build_optimizer(self._ddp, settings, optimizer)
        self._offload = Offload(self._ddp, self._optimizer)
        self._schedule = state.build_schedule(self._optimizer, optimizer)
        self._epochs = optimizer.epochs
        self._exporter = export.Exporter(
            self.ranks, self._model, shape, model, keep_on_gpu=settings.delta_base == "gpu"
        )
        self._checkpointer = state.Checkpointer(self.ranks, self._model, self._optimizer, self._schedule)
        multiple = settings.tensor_parallel if settings.sequence_parallel else 1
        self._packer = packing.Packer(shape.head_dim, shape.rope, DTYPES[settings.dtype], multiple)

    def train(self, batch: Batch, objective: Objective) -> dict[str, float]:
        if (batch.step, batch.rank) != (self.step, self.ranks.data_rank):
            raise ProtocolError(
                f"got the batch of step {batch.step}, rank {batch.rank}; "
                f"expected step {self.step}, rank {self.ranks.data_rank}"
            )
        watch = Stopwatch()
        work = self._prepare(batch, objective)
        watch.lap("step_seconds/reference")
        self._schedule.step(1)
        passes = []
        for part in self._parts(batch, work):
            passes.append((*self._accumulate(part, objective, watch), *self._update()))
            watch.lap("step_seconds/optimizer")
        self.step += 1
        metrics = self._report(passes, len(batch.minibatches) or 1, objective)
        lr = float(self._optimizer.param_groups[0]["lr"])
        return self.ranks.broadcast(metrics | {"policy/lr": lr} | watch.read())

    def evaluate(self, batch: Batch, objective: Objective) -> dict[str, float]:
        with torch.no_grad():
            results = [objective(self._terms(each)) for each in _trained(batch)]
        return self.ranks.broadcast(self._totals(results, 1, objective))

    def logprobs(self, token_ids: list[int]) -> list[float]:
        with torch.no_grad():
            count = len(token_ids)
            logprobs, _ = self._forward(np.asarray(token_ids), [count], np.arange(1, count))
        return [float(value) for value in logprobs.tolist()]

    def export(self, folder: Path, carrier: Carrier = "full") -> dict[str, TensorInfo]:
        return self._exporter.write(folder, carrier)

    def save(self, folder: Path) -> None:
        self._checkpointer.save(folder, self.step)

    def load(self, folder: Path) -> None:
        self.step = self._checkpointer.load(folder)

    def release_memory(self) -> None:
        self._offload.release()

    def restore_memory(self) -> None:
        self._offload.restore()

    def close(self) -> None:
        self.ranks.close()

    def _terms(self, work: PreparedMicroBatch) -> TrainedTokens:
        return packing.terms(work.micro, work.rows, self._predict(work), work.reference, work.proximal)

    def _predict(self, work: PreparedMicroBatch) -> tuple[Tensor, Tensor]:
        micro = work.micro
        experts = micro.routing if self._replays else b""
        return self._forward(id_array(micro.token_ids), micro.sequence_lengths, work.rows, experts)

    def _forward(
        self, ids: IdArray, lengths: Sequence[int], trained: NDArray[np.integer], experts: bytes = b""
    ) -> tuple[Tensor, Tensor]:
        tokens, packed = self._packer.pack(ids, lengths, trained)
        if experts:
            padding = tokens.shape[1] - len(ids)
            packed = replace(packed, experts=routing.read(experts, self._shape, len(ids), padding))
        logprobs, entropy = self._ddp(tokens, None, None, packed_seq_params=packed)
        return logprobs, entropy

    def _prepare(self, batch: Batch, objective: Objective) -> list[PreparedMicroBatch]:
        work = _trained(batch)
        if objective.needs_reference:
            if self._reference is None:
                raise ConfigError("[loss] kl_coefficient > 0 needs a policy that was built with a reference")
            with self._reference.in_place():
                work = [replace(each, reference=logs) for each, logs in self._fixed_logprobs(work)]
        if objective.needs_proximal and (self._epochs > 1 or len(batch.minibatches) > 1):
            work = [replace(each, proximal=logs) for each, logs in self._fixed_logprobs(work)]
        return work

    def _fixed_logprobs(
        self, work: Sequence[PreparedMicroBatch]
    ) -> Iterator[tuple[PreparedMicroBatch, Tensor]]:
        with torch.no_grad():
            for each in work:
                yield each, self._predict(each)[0]

    def _parts(
        self, batch: Batch, work: Sequence[PreparedMicroBatch]
    ) -> Iterator[Sequence[PreparedMicroBatch]]:
        """Yield what each optimizer step of a batch trains, in another order in each epoch.

        All ranks have equally many minibatches of equally many microbatches.
        """
        ends = np.cumsum(batch.minibatches or [len(work)]).tolist()
        parts = [work[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        for epoch in range(self._epochs):
            for index in np.random.default_rng((batch.step, epoch)).permutation(len(parts)):
                yield parts[index]

    def _accumulate(
        self, work: Sequence[PreparedMicroBatch], objective: Objective, watch: Stopwatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add up gradients; return the loss, and sums and maxima of the statistics."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        results = []
        for each in work:
            loss, sums, maxima = objective(self._terms(each))
            watch.lap("step_seconds/forward")
            loss.backward()
            watch.lap("step_seconds/backward")
            results.append((loss.detach(), sums, maxima))
        losses, sums, maxima = (torch.stack(parts) for parts in zip(*results, strict=True))
        if not losses.sum().isfinite():
            bad = [each.index for each, loss in zip(work, losses, strict=True) if not loss.isfinite()]
            log.warning("not finite: losses of microbatches %s, data rank %d", bad, self.ranks.data_rank)
        return losses.sum(), sums.sum(0), maxima.amax(0)

    def _update(self) -> tuple[float, bool]:
        """Take a step unless a gradient of any rank is not finite; return its norm, and if it was taken."""
        finalize_model_grads([self._ddp])  # no num_tokens: nothing is divided
        if not self._is_finite():
            return math.nan, False
        with cpu_as_cuda():
            _, norm, _ = self._optimizer.step()
        return float(norm), True

    def _is_finite(self) -> bool:
        buffers = [*self._ddp.buffers, *self._ddp.expert_parallel_buffers]
        norms = torch.stack([torch.linalg.vector_norm(buffer.grad_data) for buffer in buffers])
        is_bad = (~norms.isfinite()).any().float()
        dist.all_reduce(is_bad, dist.ReduceOp.MAX)
        return not is_bad.item()

    def _report(self, passes: Sequence[Pass], minibatches: int, objective: Objective) -> dict[str, float]:
        """Return the metrics of a batch: means over its optimizer steps, sums over one pass."""
        norms = [norm for *_, norm, is_taken in passes if is_taken]
        skipped = float(len(passes) - len(norms))
        steps = {"policy/grad_norm": fmean(norms or [math.nan]), "policy/skipped": skipped}
        found = self._totals([each[:3] for each in passes], self._epochs, objective)
        return found | steps | {"policy/loss": found["policy/loss"] / minibatches}

    def _totals(
        self, results: Sequence[tuple[Tensor, Tensor, Tensor]], epochs: int, objective: Objective
    ) -> dict[str, float]:
        """Return the loss and the objective's metrics over all ranks, as of one of `epochs` passes."""
        losses, sums, maxima = (torch.stack(parts) for parts in zip(*results, strict=True))
        totals, highest = torch.cat((losses.sum()[None].double(), sums.sum(0).double())), maxima.amax(0)
        dist.all_reduce(totals, group=self.ranks.data_group)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.ranks.data_group)
        loss, *rest = (totals / epochs).tolist()
        return {"policy/loss": loss} | objective.metrics(rest, highest.tolist())


def _trained(batch: Batch) -> list[PreparedMicroBatch]:
    where = f"step {batch.step}, rank {batch.rank}, microbatch"
    return [
        PreparedMicroBatch(index, micro, packing.trained_positions(micro, f"{where} {index}"))
        for index, micro in enumerate(batch.microbatches)
    ]
