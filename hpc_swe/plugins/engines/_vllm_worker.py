"""Extend vLLM's own processes: load weights from a folder, and require a token on every route.

`FolderTransfer` is a back end of vLLM's weight-transfer API. It changes the model only when nothing can fail
any more: vLLM's own reload empties the layers first, so that a bad file would leave an engine that dies at
its next forward pass. Before that it reads headers only, since all requests wait while it reads. The caller
has verified the files before, and names them in the update.
"""

import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
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

from hpc_swe.processes import die_with_parent

BACKEND = "hpc_swe_folder"
TOKEN = "HPC_SWE_ENGINE_TOKEN"
Scope = MutableMapping[str, Any]

log = logging.getLogger(__name__)

# vLLM's core outlives its API server when that is killed. A process that imports this dies with its parent.
die_with_parent()


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Carry nothing: a folder needs no handshake."""


@dataclass
class Folder(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Name one version to load."""

    path: str
    """Folder of the version; empty is the version before the served one."""
    files: dict[str, list[int]] | None = None
    """Weight file -> size, time of change in ns and inode; None trusts the folder, as one that was served."""
    dtypes: dict[str, str] | None = None
    """Tensor name -> type, for example float32."""


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


def _is_tied(config: Any) -> bool:
    """Return whether the model's configuration ties the head to the embedding.

    vLLM records that they are untied while it loads a checkpoint that stores the head nevertheless.
    """
    return bool(
        getattr(config.hf_text_config, "tie_word_embeddings", False)
        or getattr(config, "word_embeddings_untied_by_checkpoint", False)
    )


def check_files(folder: Path, files: dict[str, list[int]]) -> None:
    """Raise ValueError for a weight file that changed, is missing, or was not verified."""
    if names := {path.name for path in shards(folder)} ^ files.keys():
        raise ValueError(f"{min(names)}: it was not verified, or is missing")
    for name, seen in files.items():
        found = (folder / name).stat()
        if [found.st_size, found.st_mtime_ns, found.st_ino] != list(seen):
            raise ValueError(f"{name}: it is no longer the file that was verified")


def read(
    folder: Path, wanted: dict[str, list[int]], dtypes: dict[str, str] | None, is_tied: bool
) -> dict[str, torch.Tensor]:
    """Return all tensors by name, mapped into memory: what a worker does not copy is never read.

    Raise ValueError for a tensor that is unknown, of another shape or type, or missing, so that its old value
    would stay.
    """
    tensors = {}
    for file, shard, name in _entries(folder, is_tied):
        tensors[name] = tensor = shard.get_tensor(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if list(tensor.shape) != wanted.get(name):
            raise ValueError(f"{file.name}: {name} is {list(tensor.shape)}, not {wanted.get(name)}")
        if dtypes is not None and dtype != dtypes.get(name):
            raise ValueError(f"{file.name}: {name} is {dtype}, not {dtypes.get(name)}")
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise ValueError(f"{folder.name}: {missing[0]} is missing ({len(missing)} tensors in all)")
    return tensors


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Drop the kernels of experts, so that they are packed again.

    On a CPU vLLM packs experts once, together with their kernel, and would copy later weights in unpacked.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _repack_head(model: torch.nn.Module) -> None:
    """Pack the head again: a CPU uses a packed copy for logits, and reloading a tied head leaves it old."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


class FolderTransfer(WeightTransferEngine[NoInit, Folder]):  # type: ignore[misc]
    """Carry out one worker's part of an update in three calls: start, update (check) and finish (swap)."""

    init_info_cls = NoInit
    update_info_cls = Folder

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._staging = self._serving = self._previous = Path(vllm_config.model_config.model)
        self._is_tied = _is_tied(vllm_config.model_config)
        self._wanted = shapes(self._serving, self._is_tied)
        self._tensors: dict[str, torch.Tensor] = {}
        self._files: dict[str, list[int]] | None = None
        self._is_cpu = device.type == "cpu"

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing: a folder needs no handshake."""

    def start_weight_update(self) -> None:
        """Forget the tensors of an update that did not finish; the model does not change."""
        self._tensors = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check the folder. The base class would synchronize an accelerator, which a CPU worker lacks."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Folder) -> None:
        """Check a folder against the model, and keep its tensors for `finish_weight_update`."""
        folder = Path(update_info.path) if update_info.path else self._previous
        self._tensors = read(folder, self._wanted, update_info.dtypes, self._is_tied)
        self._staging, self._files = folder, update_info.files
        if self._files is not None:
            check_files(folder, self._files)

    def finish_weight_update(self) -> None:
        """Swap the weights in.

        A failure would leave half a model, which must never answer: it ends the process.
        """
        try:
            if self._is_cpu:
                _forget_packed_experts(self.model)
            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(self._tensors.items()))
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_head(self.model)
            if self._files is not None:
                check_files(self._staging, self._files)  # they must not have changed while they were read
        except BaseException:
            log.exception("swap failed half-way; ending this engine")
            os._exit(1)
        self._tensors = {}
        self._previous, self._serving = self._serving, self._staging

    def shutdown(self) -> None:
        """Do nothing: no resource is held."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: the learner writes a folder. vLLM 0.26 requires this method of every back end."""
        raise NotImplementedError("the learner publishes weights as a folder and sends nothing")


WeightTransferEngineFactory.register_engine(BACKEND, FolderTransfer)


class WorkerExtension:
    """Make workers import this module, which registers the back end; --worker-extension-cls names it."""


class BearerToken:
    """Guard all routes but /health, as ASGI middleware: vLLM's --api-key leaves the control routes open."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app, self._expected = app, f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "lifespan" or scope["path"] == "/health" or self._has_token(scope):
            await self._app(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    def _has_token(self, scope: Scope) -> bool:
        return hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected)
