"""Decide which file of a model's folder has which tensor, from its index and the headers of its files alone.

Engines, learners and evaluations load what `locate` says. A release of vLLM reads every tensor of every file
that the index names, the last one last, and without an index every file; a learner asks for tensors by name.
So where these two could differ, `locate` refuses the folder, and names the file and the tensor.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_swe.base.errors import ConfigError
from hpc_swe.models.model_shape import ModelShape, read_config, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
IMAGES = "model.visual."
UNTRAINED = (IMAGES, "mtp.")
"""Names of tensors that only accompany a model with delta nets begin so: a model of images, and layers that
predict several tokens at once."""
IGNORED = "rotary_emb.inv_freq"
"""Names of tensors that no reader wants end so: angles, which older checkpoints store."""
TYPES = ("BF16", "F16", "F32", "F64")
LARGEST_HEADER = 10**8  # as safetensors has it
POINTER = b"version https://git-lfs"
REMEDY = "copy the model again, or save it anew with transformers"
PIECE = 1 << 24
"""Bytes that are compared at once."""


@dataclass(frozen=True)
class StoredTensor:
    """Locate a tensor, and say what its file's header says of it."""

    path: Path
    dtype: str
    """As safetensors spells it, for example BF16."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    end: int
    """Byte after the last one."""

    @classmethod
    def of(cls, path: Path, data: int, entry: Mapping[str, Any]) -> "StoredTensor":
        """Read an entry of a header; the file's data begin at byte `data`."""
        start, end = entry["data_offsets"]
        return cls(path, entry["dtype"], tuple(entry["shape"]), data + start, data + end)


def locate(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a full model by name, in the order of their files.

    Raise ConfigError if a file is missing or not whole, or if readers would take different tensors from it.
    """
    index = read_index(folder)
    found: dict[str, StoredTensor] = {}
    for path in _files(folder, index):
        for name, tensor in read_header(path).items():
            if index.get(name, path.name) != path.name:
                raise ConfigError(
                    f"{path} stores {name}, which {INDEX} gives to {index[name]}: the engine would read "
                    f"both, and a learner the second; {REMEDY}"
                )
            if index and name not in index and not name.endswith(IGNORED):
                raise ConfigError(
                    f"{path} stores {name}, which {INDEX} does not name: the engine would read it, and a "
                    f"learner would not; {REMEDY}"
                )
            found[name] = tensor
    if missing := next((name for name in index if name not in found), ""):
        path = folder / index[missing]
        raise ConfigError(f"{path} has no tensor {missing}, although {INDEX} says so; copy it again")
    _require_one_head(folder, found)
    return found


def read_index(folder: Path) -> dict[str, str]:
    """Return tensor -> file of a folder's index, {} without one; raise ConfigError if it cannot be read."""
    path = folder / INDEX
    index = read_json(path).get("weight_map") if path.exists() else {}
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ConfigError(f"{path} has no weight_map; copy the model again")
    return index


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name; raise ConfigError if it is not whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise ConfigError(
                    f"{path} is the pointer of Git LFS, not the file; call `git lfs pull` there"
                )
            file.seek(0)
            [length] = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length) if length < LARGEST_HEADER else b"")
        header.pop("__metadata__", None)
        found = {name: StoredTensor.of(path, 8 + length, entry) for name, entry in header.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}; copy it again") from error
    end = max((tensor.end for tensor in found.values()), default=8 + length)
    if size < end:
        raise ConfigError(f"{path} has {size:,} of its {end:,} bytes; copy it again")
    return found


def require_tensors(folder: Path, shape: ModelShape, key: str = "model") -> None:
    """Raise ConfigError unless the files have all tensors of the model, in its sizes.

    `key` of the configuration names the folder. Folders that lack a file are left to other checks.
    """
    index = read_index(folder)
    if not all((folder / name).is_file() for name in set(index.values()) or {SINGLE}):
        return
    found = locate(folder)
    shape = shape.as_stored(found)
    if shape.is_wrapped and not any(name.startswith(IMAGES) for name in found):
        raise ConfigError(
            f"{key}: {folder / (INDEX if index else SINGLE)} has no tensor {IMAGES}*, but config.json has "
            "the model_type of a model of text and images; copy it again, or save the text model alone"
        )
    for name, size in shape.tensors.items():
        tensor = found.get(name)
        if tensor is None:
            path, where = folder / (INDEX if index else SINGLE), f"has no tensor {name}"
        elif tensor.shape != size:
            path = tensor.path
            where = f"has {name} of {list(tensor.shape)}, but config.json of the model says {list(size)}"
        elif tensor.dtype not in TYPES:
            path = tensor.path
            where = f"has {name} in {tensor.dtype}; a learner needs one of {', '.join(TYPES)}"
        else:
            continue
        raise ConfigError(f"{key}: {path} {where}; copy it again, or give another one")


def _files(folder: Path, index: dict[str, str]) -> list[Path]:
    there = sorted(path.name for path in folder.glob("*.safetensors"))
    if not there and not index:
        remedy = "copy the whole model; files of another format (*.bin, *.gguf) must be converted"
        raise ConfigError(f"{folder}: no weights (*.safetensors) there; {remedy}")
    if index:
        if missing := sorted(set(index.values()).difference(there)):
            raise ConfigError(
                f"{folder}: {len(missing)} weight files are missing, {missing[0]} first; copy them"
            )
        if SINGLE in there and SINGLE not in index.values():
            raise ConfigError(
                f"{folder / SINGLE} is beside {INDEX}, which does not name it: transformers reads the first, "
                "and engine and learner the second; remove the older one of the two"
            )
        return [folder / name for name in sorted(set(index.values()))]
    if SINGLE not in there:
        raise ConfigError(
            f"{folder} has {there[0]}, but no {INDEX}, which says what is in which file; copy it, too, or "
            f"call a single file {SINGLE}"
        )
    if more := [name for name in there if name != SINGLE]:
        name = next(iter(read_header(folder / more[0])), "no tensor")
        raise ConfigError(
            f"{folder / more[0]} stores {name}, and there is no {INDEX}: the engine would read it, too, and "
            f"a learner {SINGLE} alone; move the first out of the folder"
        )
    return [folder / SINGLE]


def _require_one_head(folder: Path, found: dict[str, StoredTensor]) -> None:
    """Raise ConfigError if config.json ties the head to the embedding, and a file stores another head.

    Some releases of vLLM load such a head, others ignore it, and a learner trains the embedding alone.
    """
    head = found.get(HEAD)
    embedding = next((found[name] for name in EMBEDDINGS if name in found), None)
    if head is None or embedding is None or not (folder / "config.json").is_file():
        return
    if read_config(folder).get("tie_word_embeddings") and not _is_equal(head, embedding):
        raise ConfigError(
            f"{head.path} stores {HEAD}, which is not {EMBEDDINGS[0]}, but config.json sets "
            "tie_word_embeddings: the engine would sample with the first, and a learner train the second; "
            "set that key to false if the model has such a head, or else save it anew with transformers"
        )


def _is_equal(one: StoredTensor, other: StoredTensor) -> bool:
    size = one.end - one.start
    if (one.dtype, one.shape, size) != (other.dtype, other.shape, other.end - other.start):
        return False
    with one.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        pieces = (min(PIECE, size - done) for done in range(0, size, PIECE))
        return all(first.read(piece) == second.read(piece) for piece in pieces)
