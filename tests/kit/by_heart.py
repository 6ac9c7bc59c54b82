"""An engine for runs whose learner is real: it plays written replies, and takes any weights for right."""

import dataclasses

from msgspec.structs import replace

from hpc_swe.base.records import ProbeScore, WeightVersion
from hpc_swe.models.engines.base import Weights
from hpc_swe.models.engines.scripted import Scripted


class ByHeart(Scripted, frozen=True, kw_only=True):
    """Computes nothing, so that no probe could tell it anything; stamps and updates are as ever."""

    def adopt(self, url: str, token: str, version: WeightVersion, probe: ProbeScore | None) -> None:
        super().adopt(url, token, version, None)

    def reload(self, url: str, token: str, weights: Weights) -> None:
        manifest = weights.manifest and replace(weights.manifest, probe=None)
        super().reload(url, token, dataclasses.replace(weights, manifest=manifest))
