"""Writes the weights as Hugging Face files: every rank its share, none the whole.

A tensor that is split over ranks is gathered on the rank with the least to write so far; every
rank, data-parallel replicas included, ends with about the same number of bytes.
"""

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

from hpc_swe.plugins.policies._megatron import convert, hf
from hpc_swe.plugins.policies._megatron.parallel import TorchRanks
from hpc_swe.plugins.policies._megatron.shape import ModelShape
from hpc_swe.plugins.policies._megatron.spec import PolicyModel
from hpc_swe.records import TensorInfo
from hpc_swe.store import atomic


class Exporter:
    """Knows which rank writes which tensor, and what lies beside weights."""

    def __init__(self, ranks: TorchRanks, model: PolicyModel, shape: ModelShape, source: Path) -> None:
        self._ranks, self._model, self._source = ranks, model, source
        self._layouts = convert.layouts(model, shape)

    def write(self, folder: Path) -> dict[str, TensorInfo]:
        """Write this rank's file; from the first byte on no rank waits for another, which may have failed.

        Raises:
            FloatingPointError: On every rank, when a tensor of any is not finite.
        """
        tensors = self._collect()
        file = f"model-{self._ranks.rank + 1:05d}-of-{self._ranks.size:05d}.safetensors"
        shares = self._ranks.gather((file, {name: tensor.nbytes for name, tensor in tensors.items()}))
        bad = [name for part in self._ranks.gather(_not_finite(tensors)) for name in part]
        if bad:  # engines serve what is published: nobody behind us looks at every number
            raise FloatingPointError(f"{bad[0]} is not finite ({len(bad)} tensors in all); not published")
        with atomic.storage(folder):
            _save(tensors, folder / file)
            if self._ranks.rank == 0:
                self._write_index(folder, shares)
                self._copy_companions(folder)
        with ThreadPoolExecutor(4) as pool:
            return dict(zip(tensors, pool.map(_describe, tensors.values()), strict=True))

    def _collect(self) -> dict[str, Tensor]:
        group, booked = self._ranks.tensor_group, [0] * self._ranks.size
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            owner = booked.index(min(booked))
            booked[owner] += parameter.numel()
            data_rank, tensor_rank = divmod(owner, group.size())
            if data_rank == self._ranks.data_rank:
                tensors |= convert.gather(parameter.data, self._layouts[name], tensor_rank, group)
        return tensors

    def _write_index(self, folder: Path, shares: list[tuple[str, dict[str, int]]]) -> None:
        index = {
            "metadata": {"total_size": sum(sum(sizes.values()) for _, sizes in shares)},
            "weight_map": {name: file for file, sizes in shares for name in sizes},
        }
        (folder / hf.INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))

    def _copy_companions(self, folder: Path) -> None:
        for path in hf.companions(self._source):
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
