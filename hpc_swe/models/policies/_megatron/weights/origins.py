"""Recognize the weights that a run takes from files at each start, and not from its checkpoints.

They are the reference of the KL term, and the model that adapters change. A checkpoint holds their digests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_swe.base.errors import ConfigError
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron.model.model import PolicyModel
from hpc_swe.models.policies._megatron.model.parallel import TorchRanks
from hpc_swe.models.policies._megatron.weights.export import Exporter
from hpc_swe.models.policies._megatron.weights.weights import Snapshot

Role = Literal["model", "reference"]
"""What weights are for, by which a checkpoint knows them; keys of the configuration have the same names."""


@dataclass(frozen=True)
class Origin:
    """Hold the digests of weights that have a role in the run."""

    role: Role
    key: Role
    """Key of the configuration that names the folder: an empty `reference` is `model`."""
    folder: Path
    digests: Mapping[str, str]
    """Name of each tensor -> its digest."""

    @classmethod
    def of(cls, role: Role, key: Role, folder: Path, model: PolicyModel, ranks: TorchRanks) -> "Origin":
        """Return the origin of the weights that the model has now; all ranks must call it together."""
        exporter = Exporter(ranks, model, ModelShape.read(folder), folder, keep_on_gpu=False)
        return cls(role, key, folder, exporter.digests())

    def require(self, saved: Mapping[str, Mapping[str, str]], checkpoint: Path) -> None:
        """Raise ConfigError if a tensor is not that of the same role with which the checkpoint was saved.

        `saved` has the digests of each role.
        """
        if self.role not in saved:
            raise ConfigError(
                f"{checkpoint}: the run had no weights as {self.role} when it was saved, and now needs those "
                f"of `{self.key}`, {self.folder}; restore the configuration, or start another run"
            )
        digests = saved[self.role]
        changed = [name for name, digest in self.digests.items() if digests.get(name) != digest]
        if changed:
            file = Snapshot(self.folder).path(changed[0])
            raise ConfigError(
                f"{file}: {changed[0]} ({len(changed)} tensors in all) is not what it was when {checkpoint} "
                f"was saved; restore the files of `{self.key}` as they were when the run started, or start "
                "another run"
            )
