"""Read the folders of weight versions: a full snapshot, and the deltas that follow it.

What is read is checked against what the engine's model needs, and the caller names each file as it was when
its checksum was verified. Full tensors are mapped into memory: what nobody copies is never read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hpc_swe.plugins.tensor_delta import Changes, Digests, text

CODES, OTHERS = ":codes", ":others"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Link:
    """Name one folder of a chain, which is a full snapshot followed by deltas."""

    folder: Path
    files: Mapping[str, Sequence[int]] | None
    """Weight file -> size, time of change in ns and inode; None trusts the folder, as one that was served."""

    def check(self) -> None:
        """Raise ValueError for a weight file that changed, is missing, or was not verified."""
        if self.files is None:
            return
        if names := {path.name for path in shards(self.folder)} ^ self.files.keys():
            raise ValueError(f"{self.folder.name}: {min(names)}: it was not verified, or is missing")
        for name, seen in self.files.items():
            found = (self.folder / name).stat()
            if [found.st_size, found.st_mtime_ns, found.st_ino] != list(seen):
                raise ValueError(f"{self.folder.name}: {name}: it is no longer the file that was verified")


@dataclass(frozen=True)
class Wanted:
    """Say what a model takes from a version."""

    shapes: dict[str, list[int]]
    """Of all its tensors, by their name in a checkpoint."""
    is_tied: bool
    """Whether the model ignores a stored head, because its head is its embedding."""
    dtypes: Mapping[str, str] | None = None
    """Tensor -> type that the manifest states, for example float32; None accepts any."""
    digests: Mapping[str, str] | None = None
    """Tensor -> digest that the manifest states; empty texts where the version has none."""

    @property
    def has_digests(self) -> bool:
        """Tell whether the manifest states a digest of every tensor."""
        stated = self.digests or {}
        return all(stated.get(name) for name in self.shapes)

    def check(self, file: Path, name: str, tensor: Tensor) -> None:
        """Raise ValueError for a tensor that is unknown, or of another shape or type."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if list(tensor.shape) != self.shapes.get(name):
            raise ValueError(f"{file.name}: {name} is {list(tensor.shape)}, not {self.shapes.get(name)}")
        if self.dtypes is not None and dtype != self.dtypes.get(name):
            raise ValueError(f"{file.name}: {name} is {dtype}, not {self.dtypes.get(name)}")


def shards(folder: Path) -> list[Path]:
    """Return the weight files of a folder, sorted by name; raise ValueError when there is none."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{folder.name}: no *.safetensors file")
    return found


def _entries(folder: Path, is_tied: bool) -> Iterator[tuple[Path, Any, str]]:
    """Yield file, open file and name of each tensor that a model takes from a checkpoint.

    vLLM ignores the others: a head tied to the embedding, and angles of older checkpoints.
    """
    for file in shards(folder):
        with safe_open(file, framework="pt", device="cpu") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                if not (is_tied and name == "lm_head.weight") and not name.endswith("rotary_emb.inv_freq"):
                    yield file, shard, name


def shapes(folder: Path, is_tied: bool) -> dict[str, list[int]]:
    """Read the shapes of the tensors that a model takes from a checkpoint, by name, from headers only."""
    return {name: shard.get_slice(name).get_shape() for _, shard, name in _entries(folder, is_tied)}


def read(folder: Path, wanted: Wanted) -> dict[str, Tensor]:
    """Return all tensors of a full snapshot by name, mapped into memory.

    Raise ValueError for a wrong tensor, or one that is missing, so that its old value would stay.
    """
    tensors = {}
    for file, shard, name in _entries(folder, wanted.is_tied):
        tensors[name] = shard.get_tensor(name)
        wanted.check(file, name, tensors[name])
    if missing := sorted(wanted.shapes.keys() - tensors.keys()):
        raise ValueError(f"{folder.name}: {missing[0]} is missing ({len(missing)} tensors in all)")
    return tensors


@dataclass(frozen=True)
class Delta:
    """Hold what one version changed."""

    changes: dict[str, Changes]
    whole: dict[str, Tensor]
    """Tensors of which too much changed."""

    @classmethod
    def read(cls, folder: Path, wanted: Wanted, device: torch.device) -> "Delta":
        """Read a delta onto a device; raise ValueError for a tensor that the model does not have."""
        changes, whole = {}, {}
        for file, shard, name in _entries(folder, wanted.is_tied):
            base = name.removesuffix(CODES)
            if base not in wanted.shapes and not name.endswith(OTHERS):
                raise ValueError(f"{file.name}: {name} is unknown")
            if base != name:
                others = shard.get_tensor(base + OTHERS).to(device)
                changes[base] = Changes(shard.get_tensor(name).to(device), others)
            elif not name.endswith(OTHERS):
                whole[name] = shard.get_tensor(name)
                wanted.check(file, name, whole[name])
                whole[name] = whole[name].to(device)
        return cls(changes, whole)


def build(chain: Sequence[Link], wanted: Wanted, device: torch.device = CPU) -> dict[str, Tensor]:
    """Return all tensors of a chain's last version in this host's memory; `device` applies the changes.

    Raise ValueError if a file is wrong, or the digests of a version made of deltas are not the manifest's.
    """
    tensors = read(chain[0].folder, wanted)
    deltas = [Delta.read(link.folder, wanted, device) for link in chain[1:]]
    if not deltas:
        return tensors
    computer, digests = Digests(device), {}
    for name in tensors:
        tensor = tensors[name].to(device, copy=True)
        for delta in deltas:
            if name in delta.whole:
                tensor.copy_(delta.whole[name])
            elif name in delta.changes:
                delta.changes[name].apply(tensor)
        digests[name] = int(computer.tensor(tensor))
        tensors[name] = tensor.cpu()
    require_digests(digests, wanted)
    return tensors


def require_digests(found: Mapping[str, int], wanted: Wanted) -> None:
    """Raise ValueError unless every digest is the manifest's."""
    stated = wanted.digests or {}
    if bad := [name for name, digest in found.items() if text(digest) != stated.get(name)]:
        raise ValueError(f"{bad[0]}: its digest is not the manifest's ({len(bad)} tensors in all)")
