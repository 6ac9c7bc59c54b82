"""Implement `Learner` with megatron-core: optimizer steps, log-probabilities, export, checkpoints.

The loss of a step is the sum over all tokens of all ranks of weight times term. Data-parallel ranks add up
their gradients. Nothing is divided, because the weights contain the denominator of the whole step.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from numpy.typing import NDArray
from torch import Tensor

from hpc_swe.base.errors import ConfigError, ProtocolError
from hpc_swe.base.records import Batch, MicroBatch, TensorInfo, id_array
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron import fit
from hpc_swe.models.policies._megatron.kernels.compat import cpu_as_cuda
from hpc_swe.models.policies._megatron.kernels.pipeline import Outputs, Pass
from hpc_swe.models.policies._megatron.memory import MemoryNeeds
from hpc_swe.models.policies._megatron.model import packing
from hpc_swe.models.policies._megatron.model.experts import ExpertLoad
from hpc_swe.models.policies._megatron.model.model import build_model
from hpc_swe.models.policies._megatron.model.parallel import TorchRanks
from hpc_swe.models.policies._megatron.model.scorer import Scorer, keep_logprobs
from hpc_swe.models.policies._megatron.settings import MegatronSettings
from hpc_swe.models.policies._megatron.state import state
from hpc_swe.models.policies._megatron.state.offload import Offload, used_gib
from hpc_swe.models.policies._megatron.stopwatch import Stopwatch
from hpc_swe.models.policies._megatron.weights import export, lora, weights
from hpc_swe.models.policies._megatron.weights.origins import Origin, Role
from hpc_swe.models.policies.base import Carrier, Objective, OptimizerConfig, Tensors, TrainedTokens

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedMicroBatch:
    """Hold a microbatch with the positions of its trained tokens, and log-probabilities that are fixed."""

    index: int
    micro: MicroBatch
    trained_positions: NDArray[np.integer]
    reference: Tensor | None = None
    proximal: Tensor | None = None
    longest: int = 0
    """Tokens of the longest microbatch of this index on all ranks; 0 where ranks need not know it."""


@dataclass(frozen=True)
class Statistics:
    """Hold what the objective returned for microbatches, detached."""

    loss: Tensor
    sums: Tensor
    maxima: Tensor

    @classmethod
    def merge(cls, parts: "Sequence[Statistics]") -> "Statistics":
        """Add up losses and sums, and take the maxima of all; `parts` is not empty."""
        return cls(
            loss=torch.stack([each.loss for each in parts]).sum(),
            sums=torch.stack([each.sums for each in parts]).sum(0),
            maxima=torch.stack([each.maxima for each in parts]).amax(0),
        )


@dataclass(frozen=True)
class Update:
    """Describe one optimizer step, or one that was left out."""

    results: Sequence[Statistics]
    """One for each microbatch; empty except on the last stage."""
    norm: float | None
    """Norm of the gradient; None if it was not finite, and the step was left out."""


class MegatronLearner:
    """Train the part of the policy on this rank; `Learner` in models/policies/base.py is its contract."""

    def __init__(
        self,
        settings: MegatronSettings,
        model: Path,
        optimizer: OptimizerConfig,
        reference: Path | None,
        tensors: Tensors | None = None,
        *,
        needs: MemoryNeeds,
    ) -> None:
        """Load `tensors` into the model, or without them the files of the folder `model`."""
        shape = ModelShape.read(model)
        settings.check(shape)
        self.ranks = TorchRanks(settings)
        settings = fit.choose_recompute(settings, shape, self.ranks, needs)
        self.recompute = settings.recompute
        self.tensor_parallel, self.deltas_of_model = settings.tensor_parallel, settings.lora_rank > 0
        self.vocabulary = shape.vocab
        self.tolerance = 1e-3 if settings.dtype == "float32" else 0.25
        self.step = 0
        self._folder = model
        self._model = build_model(shape, settings)
        origins = self._load_weights(settings, shape, reference, tensors)
        self._adapters = lora.Adapters(self._model, shape, settings, self.ranks)
        self._ddp = state.wrap(self._model)
        self._optimizer = state.build_optimizer(self._ddp, settings, optimizer, self.ranks)
        self._schedule = state.build_schedule(self._optimizer, optimizer)
        self._epochs = optimizer.epochs
        self._exporter = export.Exporter(
            self.ranks, self._model, shape, model, keep_on_gpu=settings.delta_base == "gpu"
        )
        self._offload = Offload(self._ddp, self._optimizer, self._exporter.on_device, self.ranks)
        self._checkpointer = state.Checkpointer(
            self.ranks, self._model, self._adapters, self._optimizer, self._schedule, origins
        )
        self._scorer = Scorer(self._ddp, shape, settings, self.ranks)
        self._load = ExpertLoad(self._model, self.ranks)

    def _load_weights(
        self, settings: MegatronSettings, shape: ModelShape, reference: Path | None, tensors: Tensors | None
    ) -> list[Origin]:
        model, found = self._folder, list[Origin]()
        self._reference: state.Reference | None = None
        self._is_base_reference = bool(settings.lora_rank and reference and reference.samefile(model))
        if reference is not None and not self._is_base_reference:
            weights.load(self._model, shape, weights.Snapshot(reference))
            self._reference = state.Reference(self._model, self.ranks)
            key: Role = "model" if reference.samefile(model) else "reference"
            found.append(Origin.of("reference", key, reference, self._model, self.ranks))
        weights.load(self._model, shape, tensors or weights.Snapshot(model))
        if settings.lora_rank:
            found.append(Origin.of("model", "model", model, self._model, self.ranks))
        if self._is_base_reference:
            found.append(replace(found[-1], role="reference"))
        return found

    @property
    def attention(self) -> str:
        return self._scorer.kernels

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
        self._load.begin()
        updates = []
        for part in self._parts(batch, work):
            results = self._accumulate(part, objective, watch)
            updates.append(Update(results, self._take_step()))
            if updates[-1].norm is None:
                self._name_bad(part, results)
            watch.lap("step_seconds/optimizer")
        self.step += 1
        metrics = self._report(updates, len(batch.minibatches) or 1, objective)
        lr = float(self._optimizer.param_groups[0]["lr"])
        found = self.ranks.broadcast_from_last_stage(metrics | {"policy/lr": lr} | watch.read())
        return found | self._load.metrics()

    def evaluate(self, batch: Batch, objective: Objective) -> dict[str, float]:
        def finish(each: PreparedMicroBatch, outputs: Outputs) -> tuple[Tensor, Statistics]:
            found = Statistics(*objective(_terms(each, outputs)))
            return found.loss, found

        results = self._scorer.stages.infer(self._trained(batch), Pass(self._predict, finish))
        return self.ranks.broadcast_from_last_stage(self._totals(results, 1, objective))

    def logprobs(self, token_ids: list[int]) -> list[float]:
        return self._scorer.logprobs(token_ids)

    def export(self, folder: Path, carrier: Carrier = "full") -> dict[str, TensorInfo]:
        if not self._adapters:
            return self._exporter.write(folder, carrier)
        place = folder if carrier == "delta" else folder / lora.FOLDER
        with self._adapters.writing(place, self._folder):
            return self._exporter.describe() if carrier == "delta" else self._exporter.write(folder)

    def save(self, folder: Path) -> None:
        self._checkpointer.save(folder, self.step)

    def load(self, folder: Path) -> None:
        self.step = self._checkpointer.load(folder)

    def release_memory(self) -> float | None:
        self._offload.release()
        return used_gib()

    def restore_memory(self) -> float | None:
        used = used_gib()
        self._offload.restore()
        return used

    def close(self) -> None:
        self.ranks.close()

    def _predict(self, work: PreparedMicroBatch) -> Outputs:
        micro = work.micro
        ids, positions = id_array(micro.token_ids), work.trained_positions
        return self._scorer.forward(ids, micro.sequence_lengths, positions, micro.routing, work.longest)

    def _predict_freely(self, work: PreparedMicroBatch) -> Outputs:
        """Let the routers choose: the reference is a model of its own, and no engine sampled with it."""
        micro = work.micro
        return self._scorer.forward(
            id_array(micro.token_ids), micro.sequence_lengths, work.trained_positions, longest=work.longest
        )

    def _prepare(self, batch: Batch, objective: Objective) -> list[PreparedMicroBatch]:
        work = self._trained(batch)
        if objective.needs_reference:
            with self._reference_in_place():
                found = self._fixed_logprobs(work, self._predict_freely)
                work = [replace(each, reference=logs) for each, logs in found]
        if objective.needs_proximal and (self._epochs > 1 or len(batch.minibatches) > 1):
            found = self._fixed_logprobs(work, self._predict)
            work = [replace(each, proximal=logs) for each, logs in found]
        return work

    def _trained(self, batch: Batch) -> list[PreparedMicroBatch]:
        where = f"step {batch.step}, rank {batch.rank}, microbatch"
        work = [
            PreparedMicroBatch(index, micro, packing.trained_positions(micro, f"{where} {index}"))
            for index, micro in enumerate(batch.microbatches)
        ]
        if self.ranks.shares_experts:
            sizes = self.ranks.gather([sum(micro.sequence_lengths) for micro in batch.microbatches])
            most = [max(each) for each in zip(*sizes, strict=True)]
            work = [replace(each, longest=size) for each, size in zip(work, most, strict=True)]
        return work

    def _reference_in_place(self) -> AbstractContextManager[None]:
        if self._is_base_reference:
            return self._adapters.removed()
        if self._reference is None:
            raise ConfigError("[loss] kl_coefficient > 0 needs a policy that was built with a reference")
        return self._reference.in_place()

    def _fixed_logprobs(
        self, work: Sequence[PreparedMicroBatch], predict: Callable[[PreparedMicroBatch], Outputs]
    ) -> Iterator[tuple[PreparedMicroBatch, Tensor | None]]:
        """Yield microbatches with their log-probabilities, which only the last stage has and needs."""
        found = self._scorer.stages.infer(work, Pass(predict, keep_logprobs))
        return zip(work, found or [None] * len(work), strict=True)

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
    ) -> list[Statistics]:
        """Add up gradients; return the statistics of each microbatch, on the last stage only."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

        def finish(each: PreparedMicroBatch, outputs: Outputs) -> tuple[Tensor, Statistics]:
            loss, sums, maxima = objective(_terms(each, outputs))
            return loss, Statistics(loss.detach(), sums, maxima)

        return self._scorer.stages.train(work, Pass(self._predict, finish, watch.lap))

    def _name_bad(self, work: Sequence[PreparedMicroBatch], results: Sequence[Statistics]) -> None:
        pairs = zip(work, results, strict=False)  # the last stage alone has results
        bad = [each.index for each, found in pairs if not math.isfinite(found.loss)]
        if bad:
            log.warning("not finite: losses of microbatches %s, data rank %d", bad, self.ranks.data_rank)

    def _take_step(self) -> float | None:
        """Return the norm of the gradient; if it is not finite on any rank, take no step and return None."""
        finalize_model_grads([self._ddp])  # no num_tokens: nothing is divided
        self._adapters.add_up_gradients()
        with cpu_as_cuda():
            self._optimizer.prepare_grads()
            norm = self._optimizer.get_grad_norm()
            if not math.isfinite(norm):
                return None
            state.clip(self._optimizer, norm)
            self._optimizer.step_with_ready_grads()
        self._adapters.merge()
        return float(norm)

    def _report(self, updates: Sequence[Update], minibatches: int, objective: Objective) -> dict[str, float]:
        if not self.ranks.is_last_stage:
            return {}
        norms = [each.norm for each in updates if each.norm is not None]
        skipped = float(len(updates) - len(norms))
        steps = {"policy/grad_norm": fmean(norms or [math.nan]), "policy/skipped": skipped}
        totals = [Statistics.merge(each.results) for each in updates]
        found = self._totals(totals, self._epochs, objective)
        return found | steps | {"policy/loss": found["policy/loss"] / minibatches}

    def _totals(self, results: Sequence[Statistics], epochs: int, objective: Objective) -> dict[str, float]:
        """Return the loss and the objective's metrics over all ranks, as of one of `epochs` passes.

        Only the last stage has any.
        """
        if not self.ranks.is_last_stage:
            return {}
        found = Statistics.merge(results)
        totals, highest = torch.cat((found.loss[None].double(), found.sums.double())), found.maxima
        dist.all_reduce(totals, group=self.ranks.data_group)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.ranks.data_group)
        loss, *rest = (totals / epochs).tolist()
        return {"policy/loss": loss} | objective.metrics(rest, highest.tolist())


def _terms(work: PreparedMicroBatch, outputs: Outputs) -> TrainedTokens:
    return packing.terms(work.micro, work.trained_positions, outputs, work.reference, work.proximal)
