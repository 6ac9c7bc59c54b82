"""Write the weights of a policy as Hugging Face files, every rank its share."""

import errno
import hashlib
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hpc_swe.plugins.model_shape import ModelShape
from hpc_swe.plugins.policies._megatron.model import PolicyModel
from hpc_swe.plugins.policies._megatron.parallel import TorchRanks
from hpc_swe.plugins.policies._megatron.weights import INDEX, gather, layouts
from hpc_swe.records import TensorInfo
from hpc_swe.store import atomic


class Exporter:
    """Write Hugging Face files: every rank writes its share, and none holds the whole model.

    A tensor that is split over ranks is gathered on the rank with the least to write so far, so every rank,
    data-parallel replicas included, writes about the same number of bytes.
    """

    def __init__(self, ranks: TorchRanks, model: PolicyModel, shape: ModelShape, source: Path) -> None:
        self._ranks, self._model, self._source = ranks, model, source
        self._layouts = layouts(model, shape)

    def write(self, folder: Path) -> dict[str, TensorInfo]:
        """Write this rank's file; once writing starts, no rank waits for another, which may have failed."""
        tensors = self._collect()
        file = f"model-{self._ranks.rank + 1:05d}-of-{self._ranks.size:05d}.safetensors"
        shares = self._ranks.gather((file, {name: tensor.nbytes for name, tensor in tensors.items()}))
        bad = [name for part in self._ranks.gather(_not_finite(tensors)) for name in part]
        if bad:  # engines serve what is published, and nothing after this checks every number
            raise FloatingPointError(f"{bad[0]} is not finite ({len(bad)} tensors in all); not published")
        with atomic.storage(folder):
            _save(tensors, folder / file)
            if self._ranks.rank == 0:
                total = sum(sum(sizes.values()) for _, sizes in shares)
                where = {name: file for file, sizes in shares for name in sizes}
                index = {"metadata": {"total_size": total}, "weight_map": where}
                (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))
                self._copy_companions(folder)
        with ThreadPoolExecutor(4) as pool:
            return dict(zip(tensors, pool.map(_describe, tensors.values()), strict=True))

    def _collect(self) -> dict[str, Tensor]:
        group, assigned = self._ranks.tensor_group, [0] * self._ranks.size
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            owner = assigned.index(min(assigned))
            assigned[owner] += parameter.numel()
            data_rank, tensor_rank = divmod(owner, group.size())
            if data_rank == self._ranks.data_rank:
                tensors |= gather(parameter.data, self._layouts[name], tensor_rank, group)
        return tensors

    def _copy_companions(self, folder: Path) -> None:
        for path in self._source.iterdir():  # configuration, tokenizer, chat template, generation settings
            is_weights = path.name in (INDEX, "MANIFEST.json")
            if path.suffix in (".json", ".jinja", ".txt", ".model") and not is_weights:
                shutil.copyfile(path, folder / path.name)
        config = json.loads((self._source / "config.json").read_text())
        dtype = str(self._model.config.params_dtype).removeprefix("torch.")
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        if config.get(key) != dtype:
            (folder / "config.json").write_text(json.dumps(config | {key: dtype}, indent=2))


def _not_finite(tensors: dict[str, Tensor]) -> list[str]:
    with ThreadPoolExecutor(4) as pool:
        finite = pool.map(lambda tensor: bool(tensor.isfinite().all()), tensors.values())
        return [name for name, each in zip(tensors, finite, strict=True) if not each]


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EINVAL, str(error)) from error


def _describe(tensor: Tensor) -> TensorInfo:
    data = tensor.view(torch.uint8).numpy()
    return TensorInfo(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        sha256=hashlib.sha256(data).hexdigest(),
    )
