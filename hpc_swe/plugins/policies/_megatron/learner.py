"""Implement `Learner` with megatron-core: optimizer steps, log-probabilities, export, checkpoints.

The loss of a step is the sum over all tokens of all ranks of weight times term. Data-parallel ranks add up
their gradients. Nothing is divided, because the weights contain the denominator of the whole step.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from hpc_swe.errors import ConfigError, ProtocolError
from hpc_swe.plugins.model_shape import ModelShape
from hpc_swe.plugins.policies._megatron import packing, state, weights
from hpc_swe.plugins.policies._megatron.compat import cpu_as_cuda
from hpc_swe.plugins.policies._megatron.model import build_model
from hpc_swe.plugins.policies._megatron.parallel import DTYPES, TorchRanks
from hpc_swe.plugins.policies._megatron.settings import MegatronSettings
from hpc_swe.plugins.policies.base import Objective, OptimizerConfig
from hpc_swe.records import Batch, TensorInfo, id_array


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


class MegatronLearner:
    """Train the part of the policy on this rank; `Learner` in plugins/policies/base.py is its contract."""

    def __init__(
        self, settings: MegatronSettings, model: Path, optimizer: OptimizerConfig, reference: Path | None
    ) -> None:
        shape = ModelShape.read(model)
        shape.check_parallel(settings.tensor_parallel, settings.sequence_parallel)
        self.ranks = TorchRanks(settings.tensor_parallel)
        self.tensor_parallel = settings.tensor_parallel
        self.vocabulary = shape.vocab
        self.tolerance = 1e-3 if settings.dtype == "float32" else 0.25
        self.step = 0
        self._model = build_model(shape, settings)
        self._reference: state.Reference | None = None
        if reference is not None:
            weights.load(self._model, shape, weights.Snapshot(reference), self.ranks.tensor_group)
            self._reference = state.Reference(self._model)
        weights.load(self._model, shape, weights.Snapshot(model), self.ranks.tensor_group)
        self._ddp = state.wrap(self._model, settings)
        self._optimizer = state.build_optimizer(self._ddp, settings, optimizer)
        self._schedule = state.build_schedule(self._optimizer, optimizer)
        self._exporter = weights.Exporter(self.ranks, self._model, shape, model)
        self._checkpointer = state.Checkpointer(self.ranks, self._model, self._optimizer, self._schedule)
        multiple = settings.tensor_parallel if settings.sequence_parallel else 1
        self._packer = packing.Packer(shape.head_dim, shape.theta, DTYPES[settings.dtype], multiple)

    def train(self, batch: Batch, objective: Objective) -> dict[str, float]:
        if (batch.step, batch.rank) != (self.step, self.ranks.data_rank):
            raise ProtocolError(
                f"got the batch of step {batch.step}, rank {batch.rank}; "
                f"expected step {self.step}, rank {self.ranks.data_rank}"
            )
        watch = Stopwatch()
        trained = _trained_positions(batch)
        losses, sums, maxima = self._accumulate(batch, trained, objective, watch)
        norm = self._update()
        watch.lap("step_seconds/optimizer")
        metrics = self._report(losses, sums, maxima, objective)
        self._check_finite(metrics["policy/loss"], norm, losses)
        lr = float(self._optimizer.param_groups[0]["lr"])
        metrics |= {"policy/grad_norm": norm, "policy/lr": lr} | watch.read()
        return self.ranks.broadcast(metrics)

    def evaluate(self, batch: Batch, objective: Objective) -> dict[str, float]:
        results = []
        with torch.no_grad():
            for micro, rows in zip(batch.microbatches, _trained_positions(batch), strict=True):
                model = self._forward(id_array(micro.token_ids), micro.sequence_lengths, rows)
                results.append(objective(packing.terms(micro, rows, model, None)))
        return self.ranks.broadcast(self._report(*_total(results), objective))

    def logprobs(self, token_ids: list[int]) -> list[float]:
        with torch.no_grad():
            logprobs, _ = self._forward(np.asarray(token_ids), [len(token_ids)], np.arange(1, len(token_ids)))
        return [float(value) for value in logprobs.tolist()]

    def export(self, folder: Path) -> dict[str, TensorInfo]:
        return self._exporter.write(folder)

    def save(self, folder: Path) -> None:
        self._checkpointer.save(folder, self.step)

    def load(self, folder: Path) -> None:
        self.step = self._checkpointer.load(folder)

    def close(self) -> None:
        self.ranks.close()

    def _forward(self, ids: np.ndarray, lengths: Sequence[int], trained: np.ndarray) -> tuple[Tensor, Tensor]:
        tokens, packed = self._packer.pack(ids, lengths, trained)
        logprobs, entropy = self._ddp(tokens, None, None, packed_seq_params=packed)
        return logprobs, entropy

    def _reference_logprobs(self, batch: Batch, trained: list[np.ndarray]) -> list[Tensor]:
        if self._reference is None:
            raise ConfigError("[loss] kl_coefficient > 0 needs a policy that was built with a reference")
        with torch.no_grad(), self._reference.in_place():
            pairs = zip(batch.microbatches, trained, strict=True)
            return [self._forward(id_array(m.token_ids), m.sequence_lengths, rows)[0] for m, rows in pairs]

    def _accumulate(
        self, batch: Batch, trained: list[np.ndarray], objective: Objective, watch: Stopwatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add up gradients; return losses [microbatches], and sums and maxima of the statistics."""
        given = objective.needs_reference
        references = self._reference_logprobs(batch, trained) if given else [None] * len(trained)
        watch.lap("step_seconds/reference")
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        results = []
        for micro, rows, reference in zip(batch.microbatches, trained, references, strict=True):
            model = self._forward(id_array(micro.token_ids), micro.sequence_lengths, rows)
            loss, sums, maxima = objective(packing.terms(micro, rows, model, reference))
            watch.lap("step_seconds/forward")
            loss.backward()
            watch.lap("step_seconds/backward")
            results.append((loss.detach(), sums, maxima))
        return _total(results)

    def _update(self) -> float:
        finalize_model_grads([self._ddp])  # no num_tokens: nothing is divided
        self._schedule.step(1)
        with cpu_as_cuda():
            _, norm, _ = self._optimizer.step()
        self.step += 1
        return float(norm)

    def _report(self, losses: Tensor, sums: Tensor, maxima: Tensor, objective: Objective) -> dict[str, float]:
        totals = torch.cat((losses.sum()[None].double(), sums.double()))
        dist.all_reduce(totals, group=self.ranks.data_group)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.ranks.data_group)
        loss, *rest = totals.tolist()
        return {"policy/loss": loss} | objective.metrics(rest, maxima.tolist())

    def _check_finite(self, loss: float, norm: float, losses: Tensor) -> None:
        """Raise on every rank when the step is not finite: all ranks see the same sums."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        bad = (~losses.isfinite()).nonzero()[:, 0].tolist()
        rank = self.ranks.data_rank
        where = f"microbatches {bad} of data-parallel rank {rank}" if bad else "no loss of this rank"
        raise FloatingPointError(
            f"step {self.step - 1}: loss {loss}, gradient norm {norm}; not finite: {where}. "
            "Nothing was published; a restart resumes from the last checkpoint"
        )


def _trained_positions(batch: Batch) -> list[np.ndarray]:
    return [
        packing.trained_positions(micro, f"step {batch.step}, rank {batch.rank}, microbatch {index}")
        for index, micro in enumerate(batch.microbatches)
    ]


def _total(results: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses [microbatches], the sums added up, and the largest maxima."""
    losses, sums, maxima = (torch.stack(parts) for parts in zip(*results, strict=True))
    return losses, sums.sum(0), maxima.amax(0)
