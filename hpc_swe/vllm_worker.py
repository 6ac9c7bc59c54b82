"""What vLLM's own processes load of us: weights from a folder, and a token before every route.

`FolderTransfer` is a back end of vLLM's weight-transfer API. It verifies a published version while the
model goes on serving, and touches the model only when nothing is left to go wrong: vLLM's own reload
empties the layers first, so a bad file would leave an engine that dies at its next forward pass.
"""

import hashlib
import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "hpc_swe_folder"
TOKEN = "HPC_SWE_ENGINE_TOKEN"
Shapes = dict[str, list[int]]
Message = MutableMapping[str, Any]

log = logging.getLogger(__name__)


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """A folder needs no handshake."""


@dataclass
class Folder(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One version to load."""

    path: str
    """Empty goes back to the one before."""
    sha256: dict[str, str] | None = None
    """File name -> hexadecimal digest; None trusts the folder, as for the one the engine started on."""
    dtypes: dict[str, str] | None = None
    """Tensor name -> safetensors' name of its type, for example F32."""


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, ...}; a safetensors file begins with its length, then this as JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path.name}: not a safetensors file")
        try:
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path.name}: not a safetensors file: {error}") from None
    header.pop("__metadata__", None)
    return header


def _shards(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder.name}: no *.safetensors file")
    return files


def _shapes(folder: Path) -> Shapes:
    return {name: info["shape"] for file in _shards(folder) for name, info in _header(file).items()}


def check_tensors(folder: Path, wanted: Shapes, dtypes: dict[str, str] | None) -> None:
    """Names, shapes and types. A missing tensor would silently keep its old value.

    Raises:
        ValueError: Names the tensor and the file or folder.
    """
    for file in _shards(folder):
        for name, info in _header(file).items():
            if name not in wanted:
                raise ValueError(f"{file.name}: tensor {name} is not in the model")
            if info["shape"] != wanted[name]:
                raise ValueError(f"{file.name}: tensor {name} has shape {info['shape']}, not {wanted[name]}")
            if dtypes is not None and info["dtype"] != dtypes.get(name):
                raise ValueError(f"{file.name}: tensor {name} is {info['dtype']}, not {dtypes.get(name)}")
    if missing := sorted(wanted.keys() - _shapes(folder).keys()):
        raise ValueError(f"{folder.name}: tensor {missing[0]} is missing ({len(missing)} in all)")


def check_digests(folder: Path, sha256: dict[str, str]) -> None:
    """Contents of every shard.

    Raises:
        ValueError: Names the file.
    """

    def check(file: Path) -> None:
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != sha256.get(file.name):
                raise ValueError(f"{file.name}: its sha256 is not the manifest's")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, _shards(folder)))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, mapped rather than copied.

    Raises:
        ValueError: Names a tensor that is not finite, and its file.
    """
    tensors = {}
    for file in _shards(folder):
        with safe_open(file, framework="pt", device="cpu") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                tensors[name] = shard.get_tensor(name)
                if not torch.isfinite(tensors[name]).all():
                    raise ValueError(f"{file.name}: tensor {name} is not finite")
    return tensors


class FolderTransfer(WeightTransferEngine[NoInit, Folder]):  # type: ignore[misc]
    """One worker's side of an update: start, update (verify), finish (swap)."""

    init_info_cls = NoInit
    update_info_cls = Folder

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._wanted = _shapes(Path(vllm_config.model_config.model))
        self._staged: dict[str, torch.Tensor] = {}
        self._staging = self._serving = self._previous = str(vllm_config.model_config.model)

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing is touched yet."""
        self._staged = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Verify. The base class would synchronize an accelerator, which a CPU worker has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Folder) -> None:
        """Verify a folder and keep its tensors at hand.

        Raises:
            ValueError: The folder is not what its manifest says; the model is as it was.
        """
        self._staging = update_info.path or self._previous
        folder = Path(self._staging)
        check_tensors(folder, self._wanted, update_info.dtypes)
        if update_info.sha256 is not None:
            check_digests(folder, update_info.sha256)
        self._staged = read_tensors(folder)

    def finish_weight_update(self) -> None:
        """Swap. A failure here leaves half a model, which must never answer: the worker ends."""
        try:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(self._staged.items()))
            finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:
            log.exception("swap failed half-way; ending this engine")
            os._exit(1)
        self._staged = {}
        self._previous, self._serving = self._serving, self._staging

    def shutdown(self) -> None:
        """Nothing is held."""


WeightTransferEngineFactory.register_engine(BACKEND, FolderTransfer)


class WorkerExtension:
    """Named in --worker-extension-cls so that workers import this module, which registers the back end."""


class BearerToken:
    """ASGI middleware: vLLM's --api-key leaves the control routes open; this guards all but /health."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app, self._expected = app, f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(
        self, scope: Message, receive: Callable[..., Any], send: Callable[[Message], Any]
    ) -> None:
        """Answer 401, or pass on."""
        if scope["type"] == "lifespan" or scope.get("path") == "/health" or self._knows(scope):
            await self._app(scope, receive, send)
        else:
            headers = [(b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body"})

    def _knows(self, scope: Message) -> bool:
        return hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected)
