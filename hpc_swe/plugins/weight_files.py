"""Check from their headers alone whether the files of a model's weights are whole and have all tensors."""

import json
import struct
from pathlib import Path
from typing import Any

from hpc_swe.errors import ConfigError
from hpc_swe.plugins.model_shape import ModelShape

INDEX = "model.safetensors.index.json"
TYPES = ("BF16", "F16", "F32", "F64")
LARGEST_HEADER = 10**8  # as safetensors has it
POINTER = b"version https://git-lfs"


def read_index(folder: Path) -> dict[str, str]:
    """Return tensor -> file of a folder's index, {} without one; raise ConfigError if it cannot be read."""
    try:
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{folder / INDEX} cannot be read: {error}; copy the model again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{folder / INDEX} has no weight_map; copy the model again")
    return found


def read_header(path: Path) -> dict[str, Any]:
    """Return name -> dtype, shape and offsets of a file; raise ConfigError if it is not whole."""
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
        end = 8 + length + max((each["data_offsets"][1] for each in header.values()), default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}; copy it again") from error
    if size < end:
        raise ConfigError(f"{path} has {size:,} of its {end:,} bytes; copy it again")
    return dict(header)


def require_tensors(folder: Path, shape: ModelShape, key: str = "model") -> None:
    """Raise ConfigError unless the files have all tensors of the model, in its sizes.

    `key` of the configuration names the folder. Folders that lack a file are left to other checks.
    """
    index, headers = read_index(folder), dict[str, dict[str, Any]]()
    named = sorted(path.name for path in folder.glob("*.safetensors"))
    if named and not index and "model.safetensors" not in named:
        raise ConfigError(
            f"{key}: {folder} has {named[0]}, but no {INDEX}, which says what is in which file; copy it, "
            "too, or call a single file model.safetensors"
        )
    if not all((folder / name).is_file() for name in set(index.values()) or {"model.safetensors"}):
        return
    for name, size in shape.tensors.items():
        path = folder / index.get(name, "model.safetensors")
        if path.name not in headers:
            headers[path.name] = read_header(path)
        found = headers[path.name].get(name)
        if found is None:
            where = f"has no tensor {name}"
        elif tuple(found["shape"]) != size:
            where = f"has {name} of {found['shape']}, but config.json of the model says {list(size)}"
        elif found["dtype"] not in TYPES:
            where = f"has {name} in {found['dtype']}; a learner needs one of {', '.join(TYPES)}"
        else:
            continue
        raise ConfigError(f"{key}: {path} {where}; copy it again, or give another one")
