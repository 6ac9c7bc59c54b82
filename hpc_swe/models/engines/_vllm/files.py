"""Read the folders of weight versions: a full snapshot, and the deltas that follow it.

What is read is checked against what the engine's model needs, and the caller names each file as it was when
its checksum was verified. Full tensors are mapped into memory: what nobody copies is never read.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpc_swe.base.errors import ConfigError
from hpc_swe.models.deltas.low_rank import ADAPTER_CONFIG, Factors
from hpc_swe.models.deltas.tensor_delta import Changes, Digests, text
from hpc_swe.models.weight_files import HEAD, IGNORED, INDEX, UNTRAINED, StoredTensor, locate

MODEL_REMEDY = "restore the files of `model` as they were when the run started"
CODES, OTHERS = ":codes", ":others"
CPU = torch.device("cpu")
THREADS = min(8, os.cpu_count() or 1)
BUFFER = 1 << 25
"""Bytes of pinned memory through which a thread reads; PyTorch uses one of the same size again."""
DTYPES = {
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
ENTRY = {"data_offsets", "dtype", "shape"}
_IDLE: "defaultdict[torch.device, list[torch.cuda.Stream]]" = defaultdict(list)


@dataclass(frozen=True)
class Link:
    """Name one folder of a chain, which is a full snapshot followed by deltas."""

    folder: Path
    files: Mapping[str, Sequence[int]] | None
    """File that is loaded -> size, time of change in ns and inode; None: no manifest lists the files."""

    @property
    def has_adapters(self) -> bool:
        """Return whether the folder holds adapters of the initial model."""
        return (self.folder / ADAPTER_CONFIG).exists()

    def check(self) -> None:
        """Raise ValueError for a file that changed, is missing, or was not verified."""
        if self.files is None:
            return
        found = _identities(self.folder)
        if names := found.keys() ^ self.files.keys():
            raise ValueError(f"{self.folder.name}: {min(names)}: it was not verified, or is missing")
        for name, seen in self.files.items():
            if found[name] != list(seen):
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
        """Return whether the manifest states a digest of every tensor."""
        stated = self.digests or {}
        return all(stated.get(name) for name in self.shapes)

    def check(self, file: Path, name: str, tensor: Tensor) -> None:
        """Raise ValueError for a tensor that is unknown, or of another shape or type."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if list(tensor.shape) != self.shapes.get(name):
            raise ValueError(f"{file.name}: {name} is {list(tensor.shape)}, not {self.shapes.get(name)}")
        if self.dtypes is not None and dtype != self.dtypes.get(name):
            raise ValueError(f"{file.name}: {name} is {dtype}, not {self.dtypes.get(name)}")


def _identities(folder: Path) -> dict[str, list[int]]:
    more = [folder / name for name in (ADAPTER_CONFIG, INDEX)]
    found = {}
    for path in [*shards(folder), *(path for path in more if path.exists())]:
        stat = path.stat()
        found[path.name] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    return found


def shards(folder: Path) -> list[Path]:
    """Return the weight files of a folder, sorted by name; raise ValueError when there is none."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{folder.name}: no *.safetensors file")
    return found


def _entries(files: Iterable[Path], is_tied: bool) -> Iterator[tuple[Path, Any, str]]:
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                if _is_taken(name, is_tied):
                    yield file, shard, name


def _is_taken(name: str, is_tied: bool) -> bool:
    """Return whether vLLM does not ignore it, as it does a tied head, angles, and what is beside a text."""
    return not (is_tied and name == HEAD or name.endswith(IGNORED) or name.startswith(UNTRAINED))


def _located(folder: Path, is_tied: bool) -> dict[str, StoredTensor]:
    """Return what a model takes from a full snapshot; raise ValueError where readers would differ."""
    try:
        found = locate(folder)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return {name: tensor for name, tensor in found.items() if _is_taken(name, is_tied)}


def shapes(folder: Path, is_tied: bool) -> dict[str, list[int]]:
    """Read the shapes of the tensors that a model takes from a full snapshot, by name, from headers only."""
    return {name: list(tensor.shape) for name, tensor in _located(folder, is_tied).items()}


def read(folder: Path, wanted: Wanted) -> dict[str, Tensor]:
    """Return all tensors of a full snapshot by name, mapped into memory.

    Raise ValueError for a wrong tensor, or one that is missing, so that its old value would stay.
    """
    tensors = {}
    files = dict.fromkeys(tensor.path for tensor in _located(folder, wanted.is_tied).values())
    for file, shard, name in _entries(files, wanted.is_tied):
        tensors[name] = shard.get_tensor(name)
        wanted.check(file, name, tensors[name])
    if missing := sorted(wanted.shapes.keys() - tensors.keys()):
        raise ValueError(f"{folder.name}: {missing[0]} is missing ({len(missing)} tensors in all)")
    return tensors


def read_first(chain: Sequence[Link], wanted: Wanted) -> dict[str, Tensor]:
    """Read the full snapshot of a chain; below adapters it is the initial model, of any type of numbers."""
    with _naming_model(chain):
        return read(chain[0].folder, replace(wanted, dtypes=None) if chain[-1].has_adapters else wanted)


def with_files(chain: Sequence[Link]) -> tuple[Link, ...]:
    """Return the chain with the files of its first link as they are now, where no manifest lists them."""
    first, *rest = chain
    if first.files is not None:
        return tuple(chain)
    with _naming_model(chain):
        return (Link(first.folder, _identities(first.folder)), *rest)


def check_files(chain: Sequence[Link]) -> None:
    """Raise ValueError unless the files of a chain are those that were verified."""
    with _naming_model(chain):
        shards(chain[0].folder)
    for link in chain:
        link.check()


@contextmanager
def _naming_model(chain: Sequence[Link]) -> Iterator[None]:
    """Name the folder and the remedy in errors about the model below adapters, whose files may change."""
    try:
        yield
    except (ValueError, SafetensorError) as error:
        if not chain[-1].has_adapters:
            raise
        raise ValueError(f"{chain[0].folder}: {error}; {MODEL_REMEDY}") from error


@dataclass(frozen=True)
class Delta:
    """Hold what one version changed."""

    changes: dict[str, Changes]
    whole: dict[str, Tensor]
    """Tensors of which too much changed."""
    factors: Mapping[str, Sequence[Factors]] = field(default_factory=dict)
    """Adapters that are merged into the initial model, in place of all else; those of a tensor of all experts
    are in the order of its rows."""

    @classmethod
    def read(cls, folder: Path, wanted: Wanted, device: torch.device = CPU) -> "Delta":
        """Read a delta onto a device, several files at a time; tensors on the CPU are mapped files.

        Raise ValueError for a tensor that the model does not have, and for half of a tensor's changes.
        """
        with ThreadPoolExecutor(THREADS) as pool:
            parts = pool.map(lambda file: _to_device(file, wanted.is_tied, device), shards(folder))
            stored = {name: tensor for part in parts for name, tensor in part.items()}
        if (folder / ADAPTER_CONFIG).exists():
            return cls({}, {}, _factors(folder, stored, wanted))
        changes, whole = {}, {}
        for name, tensor in stored.items():
            base = name.removesuffix(CODES).removesuffix(OTHERS)
            if base not in wanted.shapes:
                raise ValueError(f"{folder.name}: {name} is unknown")
            if base == name:
                wanted.check(folder, name, tensor)
                whole[name] = tensor
            elif missing := [half for half in (base + CODES, base + OTHERS) if half not in stored]:
                raise ValueError(f"{folder.name}: {missing[0]} is missing")
            else:
                changes[base] = Changes(stored[base + CODES], stored[base + OTHERS])
        return cls(changes, whole)

    def apply(self, name: str, tensor: Tensor) -> None:
        """Change a contiguous tensor from the version before to this one, on the tensor's own device."""
        if name in self.whole:
            tensor.copy_(self.whole[name])
        elif name in self.changes:
            self.changes[name].to(tensor.device).apply(tensor)
        elif name in self.factors:
            factors = self.factors[name]
            rows = tensor.view(-1, tensor.shape[-1]).chunk(len(factors))
            for each, part in zip(factors, rows, strict=True):
                each.merge(part, part)


def _factors(folder: Path, stored: Mapping[str, Tensor], wanted: Wanted) -> dict[str, list[Factors]]:
    """Return the adapters of a folder of PEFT by tensor; raise ValueError where they do not fit one."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    found: dict[str, dict[int, Factors]] = defaultdict(dict)
    for stem in {name.rpartition(".lora_")[0] for name in stored}:
        a, b = stored.get(f"{stem}.lora_A.weight"), stored.get(f"{stem}.lora_B.weight")
        name, place, parts = _place(stem.removeprefix("base_model.model."), wanted.shapes)
        *rows, columns = wanted.shapes.get(name, [0])
        if a is None or b is None or (len(b) * parts, a.shape[1]) != (math.prod(rows), columns):
            raise ValueError(f"{folder.name}: the adapters of {name} do not fit the model")
        found[name][place] = Factors(a, b, config["lora_alpha"] / config["r"])
    for name, placed in found.items():
        count = sum(len(factors.b) for factors in placed.values())
        if count != math.prod(wanted.shapes[name][:-1]) or max(placed) >= len(placed):
            raise ValueError(f"{folder.name}: {name} has adapters of some experts only")
    return {name: [placed[place] for place in sorted(placed)] for name, placed in found.items()}


def _place(stem: str, shapes: Mapping[str, list[int]]) -> tuple[str, int, int]:
    """Return the tensor that has a matrix, and which of how many parts of its rows.

    A folder with the tensors of all experts has the rows of a gate before those of an up projection.
    """
    prefix, _, rest = stem.rpartition(".experts.")
    number, _, kind = rest.partition(".")
    is_down = kind == "down_proj"
    name = f"{prefix}.experts.{'down' if is_down else 'gate_up'}_proj"
    if name not in shapes or kind not in ("gate_proj", "up_proj", "down_proj"):
        return f"{stem}.weight", 0, 1
    experts = shapes[name][0]
    if is_down:
        return name, int(number), experts
    return name, 2 * int(number) + (kind == "up_proj"), 2 * experts


def _to_device(file: Path, is_tied: bool, device: torch.device) -> dict[str, Tensor]:
    if device.type == "cpu":
        return {name: shard.get_tensor(name) for _, shard, name in _entries([file], is_tied)}
    with own_stream(device):
        return {name: tensor for name, tensor in parts_of(file, device) if _is_taken(name, is_tied)}


def parts_of(file: Path, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file by name; its bytes come to the device as one piece, through pinned memory.

    Raise ValueError if the file is shorter than its header says, or a tensor is of an unknown type, or its
    bytes are not those of its shape.
    """
    with file.open("rb") as source:
        header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        size = file.stat().st_size - source.tell()
        data = torch.empty(size, dtype=torch.uint8, device=device)
        buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=device.type == "cuda")
        for part in data.split(BUFFER):
            piece = buffer[: len(part)]
            if source.readinto(memoryview(piece.numpy())) != len(part):
                raise ValueError(f"{file.name}: it became shorter while it was read")
            part.copy_(piece, non_blocking=True)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if missing := sorted(ENTRY - entry.keys()):
            raise ValueError(f"{file.name}: {name} has no {missing[0]}")
        (start, end), dtype = entry["data_offsets"], DTYPES.get(entry["dtype"])
        count = math.prod(entry["shape"])
        if dtype is None or not 0 <= start <= end <= size or end - start != count * dtype.itemsize:
            raise ValueError(f"{file.name}: {name} is {entry}, and the file has {size} bytes")
        part = data[start:end]
        is_aligned = start % dtype.itemsize == 0
        yield name, (part if is_aligned else part.clone()).view(dtype).view(entry["shape"])


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a stream that no other thread uses, and wait for the stream; do nothing on a CPU.

    Streams are used again, because PyTorch keeps the memory that was freed on one for that stream alone.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)  # a new thread has GPU 0, where leaving the stream would make a context
    idle = _IDLE[device]
    try:
        stream = idle.pop()  # atomic, like `append`
    except IndexError:
        stream = torch.cuda.Stream(device)
    try:
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
    finally:
        idle.append(stream)


def build(chain: Sequence[Link], wanted: Wanted, device: torch.device = CPU) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a chain's last version in this host's memory, one after another.

    They are built on `device`. Nothing is kept, so that a worker needs the memory of one tensor only. Raise
    ValueError if a file is wrong.
    """
    tensors = read_first(chain, wanted)
    deltas = [Delta.read(link.folder, wanted, device if link.has_adapters else CPU) for link in chain[1:]]
    for name, stored in tensors.items():
        if not deltas:
            yield name, stored
            continue
        dtype = getattr(torch, wanted.dtypes[name]) if wanted.dtypes else stored.dtype
        tensor = stored.to(device, dtype, copy=True)
        for delta in deltas:
            delta.apply(name, tensor)
        yield name, tensor.cpu()


def check_chain(chain: Sequence[Link], wanted: Wanted, device: torch.device = CPU) -> None:
    """Build each tensor once; raise ValueError unless the digests are those of the manifest.

    A full snapshot has its files' checksums; of it only names, shapes and types are checked.
    """
    if len(chain) == 1:
        read(chain[0].folder, wanted)
        return
    computer = Digests(device)
    found = {n: int(computer.tensor(tensor.to(device))) for n, tensor in build(chain, wanted, device)}
    with _naming_model(chain):
        require_digests(found, wanted)


class KnownModel:
    """Know the files of the model below adapters, which no manifest lists, as they were when digests held."""

    def __init__(self) -> None:
        self._files: dict[str, list[int]] | None = None

    def require(self, chain: Sequence[Link], wanted: Wanted, device: torch.device) -> None:
        """Raise ValueError, with the remedy, unless the adapters of a chain change the learner's model.

        Digests are computed only when the files are others than at the last call that raised nothing.
        """
        with _naming_model(chain):
            files = _identities(chain[0].folder)
        if files == self._files:
            return
        try:
            check_chain(chain, wanted, device)
        except torch.OutOfMemoryError:
            check_chain(chain, wanted)
        Link(chain[0].folder, files).check()
        self._files = files


def require_digests(found: Mapping[str, int], wanted: Wanted) -> None:
    """Raise ValueError unless every digest is the manifest's."""
    stated = wanted.digests or {}
    if bad := [name for name, digest in found.items() if text(digest) != stated.get(name)]:
        raise ValueError(f"{bad[0]}: its digest is not the manifest's ({len(bad)} tensors in all)")
