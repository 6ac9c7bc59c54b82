"""Write the weights of a policy under Hugging Face names, every rank its share.

A full export is a folder that transformers opens. A delta holds the changes since the last export, for which
each rank keeps the values of its share: `NAME:codes` and `NAME:others` are those of `tensor_delta.Changes`,
`NAME` is a tensor of which too much changed, and a tensor without changes is absent.
"""

import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_swe.base.records import TensorInfo
from hpc_swe.base.store import atomic
from hpc_swe.models.deltas.tensor_delta import Digests, encode_all, text
from hpc_swe.models.model_shape import ModelShape, read_json
from hpc_swe.models.policies._megatron.kernels import pinned
from hpc_swe.models.policies._megatron.model.model import PolicyModel
from hpc_swe.models.policies._megatron.model.parallel import TorchRanks
from hpc_swe.models.policies._megatron.weights.tensor_file import TensorFiles
from hpc_swe.models.policies._megatron.weights.weights import (
    Layout,
    Snapshot,
    dividing_group,
    gather,
    layouts,
)
from hpc_swe.models.policies.base import Carrier
from hpc_swe.models.weight_files import INDEX, UNTRAINED, locate

KEY = "policy.delta_base"
REMEDY = f'set {KEY} = "gpu" or learner.snapshot_every = 1, or spread the policy over more nodes'
FILE_BYTES = 1 << 27
FILES = 16
"""Most files of one rank: threads write and verify them side by side."""
GROUP = 1 << 29
"""Bytes of tensors that are compared at a time; a GPU holds what was gathered for them until then.

It holds old values of these tensors and of the next ones, too.
"""

log = logging.getLogger(__name__)


class Exporter:
    """Write Hugging Face files: every rank writes its share, and none holds the whole model.

    A tensor that is split over ranks is gathered on the rank with the least to write so far, so every rank,
    data-parallel replicas included, writes about the same number of bytes.
    """

    def __init__(
        self, ranks: TorchRanks, model: PolicyModel, shape: ModelShape, source: Path, *, keep_on_gpu: bool
    ) -> None:
        self._ranks, self._model, self._source, self._keep_on_gpu = ranks, model, source, keep_on_gpu
        stored = locate(source) if any(source.glob("*.safetensors")) else {}  # a benchmark has no files
        self._layouts = layouts(model, shape.as_stored(stored))
        parameters = dict(model.named_parameters())
        self._parameters = {name: parameters[name] for name in self._layouts}
        sources = [source for layout in self._layouts.values() for source in layout.sources]
        self._names = [name for source in sources for name in (f"{source}:codes", f"{source}:others")]
        untrained = [name for name in stored if shape.delta and name.startswith(UNTRAINED)]
        own = untrained[ranks.rank :: ranks.size]
        self._accompanying = dict.fromkeys(own, Snapshot(source)) if own else {}
        self._names += self._accompanying
        self._kept: dict[str, Tensor] = {}
        """The last exported values of this rank's share; empty unless a delta may follow."""
        self._room: pinned.HostRoom | None = None
        """Host memory of exactly the size of these values; pinned where there is a GPU."""
        self._device = next(iter(model.parameters())).device
        self._digests = torch.empty(0, dtype=torch.int64, device=self._device)
        """Those of the last exported values, int64 [tensors], in the order of `_owned`."""
        self._computer = Digests(self._device)

    def write(self, folder: Path, carrier: Carrier = "full") -> dict[str, TensorInfo]:
        """Write this rank's files; no rank waits for the writing of another, which may have failed."""
        self._require_finite()
        if carrier == "full":
            self._kept, self._room = {}, None
        if carrier == "base" and not self._keep_on_gpu and self._room is None:
            self._room = self._make_room()
        files = self._open(folder, "delta" if carrier == "delta" else "model")
        infos = self._add_all(files, carrier)
        if carrier == "base" and self._kept:  # the first delta need not wait for kernels to be compiled
            least = min(self._kept.values(), key=Tensor.numel).to(self._device)
            encode_all([(least, least)], self._computer)
        shares = [] if carrier == "delta" else self._ranks.gather((files.where, files.size))
        with atomic.storage(folder):
            files.finish()
        if self._ranks.rank == 0 and carrier != "delta":
            with atomic.storage(folder):
                self._write_index(folder, shares)
                self._copy_companions(folder)
        return _described(infos, self._digests)

    def describe(self) -> dict[str, TensorInfo]:
        """Describe this rank's share as `write` does, and write nothing."""
        self._require_finite()
        return self._described_share()

    def _described_share(self) -> dict[str, TensorInfo]:
        infos, sums = {}, [self._digests[:0]]
        for name, tensor in self._owned():
            sums.append(self._computer.tensor(tensor).view(1))
            infos[name] = _info(tensor)
        return _described(infos, torch.cat(sums))

    def digests(self) -> dict[str, str]:
        """Return the digest of every tensor of the model, by name, on all ranks."""
        mine = {name: info.digest for name, info in self._described_share().items()}
        return {name: each for part in self._ranks.gather(mine) for name, each in part.items()}

    def on_device(self) -> list[Tensor]:
        """Return what is kept on the device between two exports."""
        return list(self._kept.values()) if self._keep_on_gpu else []

    def _require_finite(self) -> None:
        """Raise FloatingPointError on every rank if a parameter of any rank is not finite.

        Engines serve what is published, and nothing after this checks every number.
        """
        inf, kind = math.inf, torch.float32
        largest = [torch.linalg.vector_norm(each.data, inf, dtype=kind) for each in self._parameters.values()]
        are_finite = torch.stack(largest).isfinite().tolist()  # waits once: an engine may share the GPU
        named = zip(self._parameters, are_finite, strict=True)
        mine = {self._layouts[name].sources[0] for name, is_finite in named if not is_finite}
        if bad := sorted(set().union(*self._ranks.gather(mine))):
            raise FloatingPointError(
                f"{bad[0]}, or one fused with it, is not finite ({len(bad)} tensors in all); not published"
            )

    def _open(self, folder: Path, kind: str) -> TensorFiles:
        mine = sum(parameter.nbytes for parameter in self._parameters.values())
        share = max(self._ranks.gather(mine)) // self._ranks.replica_group.size()
        each = min(FILES, 1 + share // FILE_BYTES)
        first, count = self._ranks.rank * each + 1, self._ranks.size * each
        names = [f"{kind}-{first + i:05d}-of-{count:05d}.safetensors" for i in range(each)]
        return TensorFiles([folder / name for name in names], self._names)

    def _add_all(self, files: TensorFiles, carrier: Carrier) -> dict[str, tuple[str, list[int]]]:
        """Add this rank's share, and return types and shapes by name."""
        infos, sums = dict[str, tuple[str, list[int]]](), [self._digests[:0]]
        old = self._old_values() if carrier == "delta" else iter(())
        for group in _grouped(self._owned(), GROUP if carrier == "delta" else 0):
            infos |= {name: _info(tensor) for name, tensor in group.items()}
            if carrier == "delta":
                sums.append(self._add_changes(files, next(old), group))
            else:
                sums += [self._add_whole(files, *each, keep=carrier == "base") for each in group.items()]
            del group  # before the next one is gathered
        for name, snapshot in self._accompanying.items():
            tensor = snapshot[name].to(self._device)  # where digests are computed
            infos[name] = _info(tensor)
            if carrier == "delta":  # it never changes
                sums.append(self._digests.new_zeros(1))
            else:
                sums.append(self._add_whole(files, name, tensor, keep=False))
        self._digests = torch.cat(sums) + (self._digests if carrier == "delta" else 0)
        return infos

    def _add_whole(self, files: TensorFiles, name: str, tensor: Tensor, *, keep: bool) -> Tensor:
        files.add({name: tensor})
        if keep and name not in self._kept:
            self._kept[name] = self._place(tensor)
        if keep:
            self._kept[name].copy_(tensor, non_blocking=True)
        return self._computer.tensor(tensor).view(1)

    def _old_values(self) -> Iterator[list[Tensor]]:
        groups = (list(group.values()) for group in _grouped(iter(self._kept.items()), GROUP))
        return groups if self._room is None else self._room.ahead(groups, self._device)

    def _add_changes(self, files: TensorFiles, old: list[Tensor], group: Mapping[str, Tensor]) -> Tensor:
        """Add what changed since the last export, and keep the new values.

        Return by how much digests grow, int64 [tensors].
        """
        new = list(group.values())
        found, growths = encode_all(list(zip(old, new, strict=True)), self._computer)
        torch._foreach_copy_([self._kept[name] for name in group], new, non_blocking=True)
        named = dict(zip(group, found, strict=True))
        changed = {name: changes for name, changes in named.items() if changes and len(changes.codes)}
        # What lies one after another in memory is written at once. Codes, whose bytes may be odd, come last.
        written = {f"{name}:others": changes.others for name, changes in changed.items()}
        written |= {name: group[name] for name, changes in named.items() if changes is None}
        written |= {f"{name}:codes": changes.codes for name, changes in changed.items()}
        files.add(written)
        return growths

    def _make_room(self) -> pinned.HostRoom:
        """Take host memory for what is kept; raise NodeError on all ranks if one of them gets none."""
        size = 0
        for parameter, layout, owner in self._shared():
            group = dividing_group(self._model, layout)
            if owner is None or owner == group.rank():
                parts = 1 if owner is None or layout.dim is None else group.size()
                size += parts * parameter.nbytes + pinned.ALIGNED * len(layout.sources)
        return pinned.take(KEY, size, self._ranks, REMEDY)

    def _place(self, tensor: Tensor) -> Tensor:
        if self._room is None:
            return torch.empty_like(tensor)
        return self._room.place(tensor.shape, tensor.dtype)

    def _owned(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of this rank's share, by Hugging Face name; all ranks must run to the end."""
        for parameter, layout, owner in self._shared():
            group = dividing_group(self._model, layout)
            if owner is None:
                yield from layout.whole([parameter.data]).items()
            else:
                yield from gather(parameter.data, layout, owner, group).items()

    def _shared(self) -> Iterator[tuple[Tensor, Layout, int | None]]:
        """Yield the parameters that this rank writes, or has a part of that another rank of a group writes.

        The last is that rank, or None where no part is needed. Ranks that hold the same tensors take turns:
        those of a stage, and for divided experts others.
        """
        ranks, turns = self._ranks, dict[bool, Turns]()
        for name, parameter in self._parameters.items():
            layout = self._layouts[name]
            if layout.is_copy:
                continue
            group = dividing_group(self._model, layout)
            replicas = ranks.expert_replica_group if layout.is_divided else ranks.replica_group
            taken = turns.setdefault(layout.is_divided, Turns(group.size() * replicas.size()))
            replica, owner = divmod(taken.take(parameter), group.size())
            if replica == replicas.rank():
                yield parameter, layout, None if layout.is_divided and layout.dim is None else owner

    def _write_index(self, folder: Path, shares: Sequence[tuple[dict[str, str], int]]) -> None:
        where = {name: file for files, _ in shares for name, file in files.items()}
        index = {"metadata": {"total_size": sum(size for _, size in shares)}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))

    def _copy_companions(self, folder: Path) -> None:
        for path in self._source.iterdir():  # configuration, tokenizer, chat template, generation settings
            is_weights = path.name in (INDEX, "MANIFEST.json")
            if path.suffix in (".json", ".jinja", ".txt", ".model") and not is_weights:
                shutil.copyfile(path, folder / path.name)
        config = read_json(self._source / "config.json")
        found = _with_dtype(config, str(self._model.config.params_dtype).removeprefix("torch."))
        if found != config:
            (folder / "config.json").write_text(json.dumps(found, indent=2))


class Turns:
    """Give each tensor to the rank that has the least to write so far."""

    def __init__(self, size: int) -> None:
        self._assigned = [0] * size

    def take(self, parameter: Tensor) -> int:
        owner = self._assigned.index(min(self._assigned))
        self._assigned[owner] += parameter.numel()
        return owner


def _grouped(tensors: Iterator[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Yield groups in the order of the tensors, each of at least `size` bytes, but for the last."""
    group: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        group[name], held = tensor, held + tensor.nbytes
        if held >= size:
            yield group
            group, held = {}, 0
    if group:
        yield group


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    found = config | {"torch_dtype" if "torch_dtype" in config else "dtype": dtype}
    inner = config.get("text_config")
    return found | {"text_config": _with_dtype(inner, dtype)} if isinstance(inner, dict) else found


def _info(tensor: Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _described(infos: Mapping[str, tuple[str, list[int]]], digests: Tensor) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(dtype=dtype, shape=shape, digest=text(digest))
        for (name, (dtype, shape)), digest in zip(infos.items(), digests.tolist(), strict=True)
    }
