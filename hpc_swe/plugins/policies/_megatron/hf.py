"""What a Hugging Face model folder holds: safetensors, sharded or not, and what lies beside them."""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from hpc_swe.errors import ConfigError

INDEX = "model.safetensors.index.json"


class Snapshot:
    """Tensors of a folder by name; a file is opened when its first tensor is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        index = folder / INDEX
        self._where: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.exists() else {}

    def __getitem__(self, name: str) -> Tensor:
        """Tensor on the CPU, as stored.

        Raises:
            ConfigError: The folder has no such tensor.
        """
        file = self._where.get(name, "model.safetensors")
        try:
            if file not in self._files:
                self._files[file] = safe_open(self._folder / file, "pt")
            return self._files[file].get_tensor(name)
        except Exception as error:  # noqa: BLE001  safetensors raises its own class for a missing name
            raise ConfigError(f"model: no tensor {name} in {self._folder / file}: {error}") from error


def companions(folder: Path) -> list[Path]:
    """Files that make weights usable: configuration, tokenizer, chat template, generation settings."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in (".json", ".jinja", ".txt", ".model") and path.name not in (INDEX, "MANIFEST.json")
    )
