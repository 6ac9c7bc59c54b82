"""What vLLM's own processes load of us: weights from a folder, and a token before every route.

`FolderTransfer` is a back end of vLLM's weight-transfer API. It verifies a version while the model goes
on serving, and touches the model only when nothing is left to go wrong: vLLM's own reload empties the
layers first, so a bad file would leave an engine that dies at its next forward pass.
"""

import ctypes
import hashlib
import hmac
import logging
import os
import signal
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
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "hpc_swe_folder"
TOKEN = "HPC_SWE_ENGINE_TOKEN"
PR_SET_PDEATHSIG = 1
Scope = MutableMapping[str, Any]

log = logging.getLogger(__name__)

# vLLM's core outlives its API server when that is killed; every process that imports this does not.
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """A folder needs no handshake."""


@dataclass
class Folder(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One version to load."""

    path: str
    """Empty goes back to the one before."""
    sha256: dict[str, str] | None = None
    """File name -> hexadecimal digest; None trusts the folder, as for one that served already."""
    dtypes: dict[str, str] | None = None
    """Tensor name -> type, for example float32."""


def shards(folder: Path) -> list[Path]:
    """The weight files.

    Raises:
        ValueError: There is none.
    """
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{folder.name}: no *.safetensors file")
    return found


def shapes(folder: Path) -> dict[str, list[int]]:
    """Tensor name -> shape, of headers only."""
    found: dict[str, list[int]] = {}
    for file in shards(folder):
        with safe_open(file, framework="pt") as shard:
            found |= {name: shard.get_slice(name).get_shape() for name in shard.keys()}  # noqa: SIM118
    return found


def check_digests(folder: Path, sha256: dict[str, str]) -> None:
    """Compare every shard with its digest.

    Raises:
        ValueError: Names the file.
    """

    def check(file: Path) -> None:
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != sha256.get(file.name):
                raise ValueError(f"{file.name}: its sha256 is not the manifest's")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, shards(folder)))


def read(
    folder: Path, wanted: dict[str, list[int]], dtypes: dict[str, str] | None
) -> dict[str, torch.Tensor]:
    """All tensors, mapped rather than copied. A missing one would silently keep its old value.

    Raises:
        ValueError: A tensor is missing, unknown, of another shape or type, or not finite; names it.
    """
    tensors = {}
    for file in shards(folder):
        with safe_open(file, framework="pt", device="cpu") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                tensors[name] = tensor = shard.get_tensor(name)
                dtype = str(tensor.dtype).removeprefix("torch.")
                if list(tensor.shape) != wanted.get(name):
                    raise ValueError(f"{file.name}: {name} is {list(tensor.shape)}, not {wanted.get(name)}")
                if dtypes is not None and dtype != dtypes.get(name):
                    raise ValueError(f"{file.name}: {name} is {dtype}, not {dtypes.get(name)}")
                if not torch.isfinite(tensor).all():
                    raise ValueError(f"{file.name}: {name} is not finite")
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise ValueError(f"{folder.name}: {missing[0]} is missing ({len(missing)} tensors in all)")
    return tensors


def _repack_head(model: torch.nn.Module) -> None:
    """A CPU computes logits from a packed copy of the head; of a tied head, reloading leaves the old copy."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


class FolderTransfer(WeightTransferEngine[NoInit, Folder]):  # type: ignore[misc]
    """One worker's side of an update: start, update (verify), finish (swap)."""

    init_info_cls = NoInit
    update_info_cls = Folder

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._staging = self._serving = self._previous = Path(vllm_config.model_config.model)
        self._wanted = shapes(self._serving)
        self._tensors: dict[str, torch.Tensor] = {}

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing is touched yet."""
        self._tensors = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Verify. The base class would synchronize an accelerator, which a CPU worker has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Folder) -> None:
        """Verify a folder and keep its tensors at hand.

        Raises:
            ValueError: The folder is not what its manifest says; the model is as it was.
        """
        folder = Path(update_info.path) if update_info.path else self._previous
        if update_info.sha256 is not None:
            check_digests(folder, update_info.sha256)
        self._tensors, self._staging = read(folder, self._wanted, update_info.dtypes), folder

    def finish_weight_update(self) -> None:
        """Swap. A failure here leaves half a model, which must never answer: the process ends."""
        try:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(self._tensors.items()))
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_head(self.model)
        except BaseException:
            log.exception("swap failed half-way; ending this engine")
            os._exit(1)
        self._tensors = {}
        self._previous, self._serving = self._serving, self._staging

    def shutdown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: the learner writes a folder. vLLM 0.26 asks every back end for this method.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("the learner publishes weights as a folder and sends nothing")


WeightTransferEngineFactory.register_engine(BACKEND, FolderTransfer)


class WorkerExtension:
    """Named in --worker-extension-cls so that workers import this module, which registers the back end."""


class BearerToken:
    """ASGI middleware: vLLM's --api-key leaves the control routes open; this guards all but /health."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app, self._expected = app, f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """Answer 401, or pass on."""
        if scope["type"] == "lifespan" or scope["path"] == "/health" or self._knows(scope):
            await self._app(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    def _knows(self, scope: Scope) -> bool:
        return hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected)
