"""Move each value by the learning rate in a random direction: a learner of a large model on few GPUs.

A first step of Adam moves each value by the learning rate, and few later ones move it further. This needs
no state of an optimizer, which with a buffer of gradients takes 18 bytes for each parameter, so that 8B fits
beside what deltas keep.
"""

from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import TensorInfo
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron.model.model import build_model
from hpc_swe.models.policies._megatron.model.parallel import TorchRanks
from hpc_swe.models.policies._megatron.model.scorer import Scorer
from hpc_swe.models.policies._megatron.settings import MegatronSettings
from hpc_swe.models.policies._megatron.weights import export, weights
from hpc_swe.models.policies.base import Carrier, Tensors


class SteppedLearner:
    """Export and score as `MegatronLearner` does, on the same parts; `SteppingLearner` is its contract."""

    def __init__(self, settings: MegatronSettings, model: Path, lr: float, tensors: Tensors) -> None:
        shape = ModelShape.read(model)
        if settings.pipeline_parallel * settings.context_parallel > 1:
            raise ConfigError("[policy] these steps need pipeline_parallel = 1 and context_parallel = 1")
        settings.check(shape)
        settings = replace(settings, recompute="none")  # there is no backward
        self.ranks = TorchRanks(settings)
        self.vocabulary, self.step = shape.vocab, 0
        self.tolerance = 1.0  # no token is likely to a random model, so that rounding changes all a lot
        self._model = build_model(shape, settings)
        weights.load(self._model, shape, tensors, self.ranks.tensor_group)
        self._exporter = export.Exporter(
            self.ranks, self._model, shape, model, keep_on_gpu=settings.delta_base == "gpu"
        )
        self._scorer = Scorer(self._model, shape, settings, self.ranks)
        self._lr = lr
        with torch.no_grad():
            self._masters = [_spread(parameter) for parameter in self._model.parameters()]
            self._round()

    def export(self, folder: Path, carrier: Carrier = "full") -> dict[str, TensorInfo]:
        return self._exporter.write(folder, carrier)

    def logprobs(self, token_ids: list[int], experts: bytes = b"") -> list[float]:
        return self._scorer.logprobs(token_ids, experts)

    def close(self) -> None:
        self.ranks.close()

    def take_step(self) -> None:
        """Take one optimizer step, and wait until the device has done it."""
        with torch.no_grad():
            for master in self._masters:
                master.add_(torch.randn_like(master).sign_(), alpha=-self._lr)
            self._round()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.step += 1

    def _round(self) -> None:
        for parameter, master in zip(self._model.parameters(), self._masters, strict=True):
            parameter.copy_(master)


def _spread(parameter: Tensor) -> Tensor:
    """Return float32 values that lie evenly between those of bfloat16, as in a trained model."""
    master = parameter.detach().float()
    exponent = torch.frexp(master).exponent
    return master.add_(torch.ldexp(torch.rand_like(master).sub_(0.5), exponent.sub_(8)))
