"""Train with random gradients, one tensor after another: a learner of a large model on one GPU.

The optimizer's state of the usual learner takes 18 bytes for each parameter, with its buffer of gradients.
Here gradients exist for one tensor at a time, so 8B fits beside what deltas keep.
"""

from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from hpc_swe.plugins.model_shape import ModelShape
from hpc_swe.plugins.policies._megatron import export, packing, weights
from hpc_swe.plugins.policies._megatron.learner import MegatronLearner
from hpc_swe.plugins.policies._megatron.model import build_model
from hpc_swe.plugins.policies._megatron.parallel import DTYPES, TorchRanks
from hpc_swe.plugins.policies._megatron.settings import MegatronSettings
from hpc_swe.plugins.policies.base import Carrier, Tensors
from hpc_swe.records import TensorInfo


class SteppedLearner(MegatronLearner):
    """Export and score as `MegatronLearner` does; the steps are its own."""

    def __init__(self, settings: MegatronSettings, model: Path, lr: float, tensors: Tensors) -> None:
        shape, dtype = ModelShape.read(model), DTYPES[settings.dtype]
        settings = replace(settings, recompute="none")  # there is no backward
        self.ranks, self.tensor_parallel, self.deltas_of_model = TorchRanks(settings), 1, False
        self.vocabulary, self.tolerance, self.step = shape.vocab, 0.25, 0
        self._shape, self._replays = shape, False
        self._model = self._ddp = build_model(shape, settings)
        weights.load(self._model, shape, tensors, self.ranks.tensor_group)
        self._exporter = export.Exporter(
            self.ranks, self._model, shape, model, keep_on_gpu=settings.delta_base == "gpu"
        )
        self._packer = packing.Packer(shape, dtype, 1, rank=0, parts=1)
        self._masters = [parameter.detach().float() for parameter in self._model.parameters()]
        self._optimizers = [
            torch.optim.AdamW([master], lr=lr, betas=(0.9, 0.95), weight_decay=0.01, foreach=False)
            for master in self._masters
        ]

    def export(self, folder: Path, carrier: Carrier = "full") -> dict[str, TensorInfo]:
        return self._exporter.write(folder, carrier)

    def logprobs(self, token_ids: list[int]) -> list[float]:
        with torch.no_grad():
            count = len(token_ids)
            found = self._forward(np.asarray(token_ids), [count], np.arange(1, count))
        return [float(value) for value in found[0].tolist()]

    def take_step(self) -> None:
        """Take one optimizer step, and wait until the device has done it."""
        with torch.no_grad():
            pairs = zip(self._model.parameters(), self._masters, self._optimizers, strict=True)
            for parameter, master, optimizer in pairs:
                master.grad = torch.randn_like(master)
                optimizer.step()
                master.grad = None
                parameter.copy_(master)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.step += 1
