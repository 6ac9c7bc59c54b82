"""Write a model in bfloat16: without FP8 numbers, and without the model of images in a wrapper of Mistral's.

So learner, engine and deltas read the same plain tensors. A number in FP8 counts its value times the scale of
its tensor, or of its block of that, computed in float32 and rounded once, as transformers does it. Tensors of
`weight_files.TYPES` stay as they are stored, since all readers convert them alike.
"""

import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.store import atomic
from hpc_swe.models.model_shape import read_json
from hpc_swe.models.rope import ENGINE_KEY, QUERY_BETA, Rope
from hpc_swe.models.weight_files import HEAD, IGNORED, SINGLE, TYPES, StoredTensor, locate

FP8, SCALE = "F8_E4M3", "_scale_inv"
BESIDE = (SCALE, ".activation_scale", IGNORED)
"""Names of tensors that are of no use in bfloat16 end so."""
WRAPPERS = {"mistral3": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}}
"""Type of a model of text and images -> type of its text model -> class of this."""
RENAMED = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
"""Beginnings of names in a wrapper's files -> those of the text model alone; others belong to images."""
PIECE = 1 << 24
"""Numbers that are in memory at once."""
Size = Annotated[int, Meta(gt=0)]
COMPANIONS = (".json", ".jinja", ".txt", ".model")
REPLACED = ("config.json", "params.json", "MANIFEST.json")
OF_IMAGES = "processor_config.json"


class _Quantization(Struct):
    quant_method: str = ""
    weight_block_size: tuple[Size, Size] | None = None


class _Config(Struct):
    model_type: str
    quantization_config: _Quantization | None = None


@dataclass(frozen=True)
class UnpackedTensor:
    """Hold a stored tensor, and the scales of one in FP8."""

    tensor: StoredTensor
    scales: NDArray[np.float32] | None = None
    """[blocks of rows, blocks of columns]."""
    block: tuple[int, int] = (0, 0)
    """Rows and columns of a block."""

    @property
    def dtype(self) -> str:
        return self.tensor.dtype if self.scales is None else "BF16"

    @property
    def size(self) -> int:
        """Return the bytes that are written."""
        stored = self.tensor.end - self.tensor.start
        return stored if self.scales is None else 2 * stored

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes that are written, in order."""
        data = _bytes(self.tensor)
        if self.scales is None:
            for piece in np.split(data, range(PIECE, len(data), PIECE)):
                yield piece.data
            return
        (height, width), columns = self.block, self.tensor.shape[-1]
        values = data.reshape(-1, columns)  # experts one below another
        rows = len(values)
        step = min(height, max(1, PIECE // columns))
        for block, factors in enumerate(self.scales.repeat(width, 1)[:, :columns]):
            end = min(rows, (block + 1) * height)
            for row in range(block * height, end, step):
                found = E4M3[values[row : min(end, row + step)]] * factors
                yield bfloat16(found).reshape(-1).view(np.uint8).data


def unpack(model: Path, target: Path) -> int:
    """Write a new folder, config.json last, and return how many tensors were in FP8.

    Raise ConfigError if the model needs nothing of that, or cannot be unpacked, and StorageError.
    """
    where = model / "config.json"
    config, stored = read_json(where), locate(model)
    try:
        known = msgspec.convert(config, _Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}; copy the model again") from error
    quantized, wrapped = known.quantization_config, known.model_type in WRAPPERS
    if not quantized and not wrapped:
        raise ConfigError(
            f"{model}: its weights are neither in FP8 nor beside a model of images; use it as it is"
        )
    if quantized and quantized.quant_method != "fp8":
        raise ConfigError(f"{where}: quantization_config is not of FP8; get the model without it")
    block = quantized.weight_block_size if quantized else None
    sources = {
        new: _source(stored, name, block)
        for name in stored
        if not name.endswith(BESIDE) and (new := _renamed(name, wrapped))
    }
    count = sum(source.scales is not None for source in sources.values())
    if quantized and not count:
        raise ConfigError(f"{where} has quantization_config, but no tensor is in {FP8}; copy the model again")
    text = _text_config(model, config)
    if wrapped:
        text["tie_word_embeddings"] = HEAD not in sources
    with atomic.storage(target):
        target.mkdir(parents=True)
        _write(target / SINGLE, sources)
        for path in model.iterdir():
            is_other = path.name in REPLACED or path.name.endswith(".index.json")
            is_other |= wrapped and path.name.endswith(OF_IMAGES)
            if path.suffix in COMPANIONS and not is_other:
                shutil.copyfile(path, target / path.name)
        (target / "config.json").write_text(json.dumps(text, indent=2))
    return count


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of finite numbers, rounded to the nearest, of two to the even one."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _e4m3() -> NDArray[np.float32]:
    """Return the value of each byte of FP8, with three bits of mantissa; 127 and 255 are no numbers."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, (byte & 7) / 8
    size = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7))
    size[byte & 127 == 127] = np.nan
    return np.where(byte > 127, -size, size).astype(np.float32)


E4M3 = _e4m3()


def _renamed(name: str, wrapped: bool) -> str:
    """Return the name of a tensor in the text model alone; "" if it is of no use there."""
    if not wrapped:
        return name
    return next((new + name.removeprefix(old) for old, new in RENAMED.items() if name.startswith(old)), "")


def _source(stored: Mapping[str, StoredTensor], name: str, block: tuple[int, int] | None) -> UnpackedTensor:
    tensor, scale = stored[name], stored.get(f"{name}{SCALE}")
    if tensor.dtype in TYPES:
        return UnpackedTensor(tensor)
    if tensor.dtype != FP8:
        raise ConfigError(
            f"{tensor.path} has {name} in {tensor.dtype}; get the model in {FP8}, {', '.join(TYPES)} alone"
        )
    if scale is None:
        raise ConfigError(f"{tensor.path} has {name} in FP8, but no {name}{SCALE}; copy the model again")
    *leading, columns = tensor.shape
    rows = math.prod(leading)
    height, width = block or (rows, columns)
    grid = (-(-rows // height), -(-columns // width))
    crosses = len(leading) > 1 and leading[-1] % height > 0  # a block would have rows of two experts
    if crosses or math.prod(scale.shape) != math.prod(grid) or scale.dtype not in ("BF16", "F32"):
        raise ConfigError(
            f"{scale.path} has {name}{SCALE} of {list(scale.shape)} in {scale.dtype}, but config.json says "
            f"{list(grid)}, in BF16 or F32; copy the model again"
        )
    data = _bytes(scale)
    wide = data.view(np.uint16).astype(np.uint32) << 16 if scale.dtype == "BF16" else data.view(np.uint32)
    return UnpackedTensor(tensor, wide.view(np.float32).reshape(grid), (height, width))


def _bytes(tensor: StoredTensor) -> NDArray[np.uint8]:
    return np.memmap(tensor.path, np.uint8, "r", tensor.start, (tensor.end - tensor.start,))


def _write(path: Path, sources: Mapping[str, UnpackedTensor]) -> None:
    """Write a file of safetensors, whose header comes first."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, source in sources.items():
        offsets = [at, at := at + source.size]
        header[name] = {"dtype": source.dtype, "shape": source.tensor.shape, "data_offsets": offsets}
    words = json.dumps(header).encode()
    words = words.ljust(-(-len(words) // 8) * 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(words)) + words)
        for source in sources.values():
            file.writelines(source.pieces())
        file.flush()
        os.fsync(file.fileno())


def _text_config(model: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says, in bfloat16; where a wrapper goes, of the text model alone."""
    found, kinds, where = dict(config), WRAPPERS.get(config["model_type"]), model / "config.json"
    if kinds:
        found |= config.get("text_config") or {}
        kind = found["model_type"]
        if kind not in kinds:
            raise ConfigError(f"{where}: text_config.model_type = {kind!r} is none of {', '.join(kinds)}")
        found["architectures"] = [kinds[kind]]
        del found["text_config"]
        found.pop("vision_config", None)
    if found["model_type"] == "ministral3":
        found |= _positions(where, found)
    found.pop("quantization_config", None)
    return found | {"torch_dtype" if "torch_dtype" in found else "dtype": "bfloat16"}


def _positions(where: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Say in vLLM's words, too, how a Ministral 3 scales queries and angles."""
    rope, length = dict(config.get("rope_parameters") or {}), "original_max_position_embeddings"
    if rope.get(QUERY_BETA) is None or rope.get(length) is None:
        raise ConfigError(f"{where}: rope_parameters lacks {QUERY_BETA} or {length}; copy the model again")
    scaling = {ENGINE_KEY: {"beta": rope[QUERY_BETA], length: rope[length]}}
    if Rope.read({**config, **scaling}, str(where)).attention_factor == 1:
        rope["apply_yarn_scaling"] = False  # for vLLM 0.26, which does not read mscale
    return scaling | {"rope_parameters": rope}
