"""Extend vLLM's own processes: load weights from a folder, and require a token on every route.

`FolderTransfer` is a back end of vLLM's weight-transfer API. It changes the model only when nothing can fail
any more: vLLM's own reload empties the layers first, so that a bad file would leave an engine that dies at
its next forward pass. The caller has verified the files before, and names them in the update.
"""

import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm.distributed import get_tp_group
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

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.records import WeightManifest
from hpc_swe.base.store import folders
from hpc_swe.cluster.processes import die_with_parent
from hpc_swe.models.engines._vllm.copies import LoaderCopies, Patches
from hpc_swe.models.engines._vllm.environment import BACKEND, PER_CHANNEL, TOKEN
from hpc_swe.models.engines._vllm.files import (
    Delta,
    KnownModel,
    Link,
    Wanted,
    build,
    check_chain,
    check_files,
    read_first,
    require_digests,
    shapes,
    with_files,
)
from hpc_swe.models.engines._vllm.gate import AnswerGate
from hpc_swe.models.engines._vllm.plain import require_plain
from hpc_swe.models.engines._vllm.samples import SampleRoute
from hpc_swe.models.engines._vllm.speculation import mend_sampling
from hpc_swe.models.engines._vllm.versions import KeptTensors, LoadedVersion, log_served
from hpc_swe.models.engines.base import FALLBACK

Scope = MutableMapping[str, Any]
T = TypeVar("T")

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
    """File that is loaded -> size, time of change in ns and inode; None: no manifest lists the files."""
    parents: list[dict[str, Any]] | None = None
    """`path` and `files` of the folders that a delta builds on, from the full snapshot on."""
    dtypes: dict[str, str] | None = None
    """Tensor name -> type, for example float32."""
    digests: dict[str, str] | None = None
    """Tensor name -> digest."""

    def version(self, wanted: Wanted) -> "LoadedVersion":
        links = [*(self.parents or []), {"path": self.path, "files": self.files}]
        chain = tuple(Link(Path(each["path"]), each["files"]) for each in links)
        return LoadedVersion(chain, replace(wanted, dtypes=self.dtypes, digests=self.digests))


@dataclass(frozen=True)
class Staged:
    """Hold what was read of a version, until the engine pauses."""

    write: Callable[[], None]
    """Writes it into the worker's memory."""
    way: str
    """How that is done."""
    read: tuple[Link, ...]


def _is_tied(config: Any) -> bool:
    """Return whether the model's configuration ties the head to the embedding.

    vLLM records that they are untied while it loads a checkpoint that stores the head nevertheless.
    """
    return bool(
        getattr(config.hf_text_config, "tie_word_embeddings", False)
        or getattr(config, "word_embeddings_untied_by_checkpoint", False)
    )


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
    """Carry out one worker's part of an update in three calls: start, update (read) and finish (swap).

    A thread reads while the worker serves, and `is_staged` says when it is done. If `LoaderCopies` covers
    the model, a thread finds which values change, a swap writes those to the device's memory, and then
    compares all digests. Otherwise vLLM reloads all tensors, which are built one after another, or are kept
    in this host's memory where it quantizes them.
    """

    init_info_cls = NoInit
    update_info_cls = Folder

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._device, self._dtype = device, vllm_config.model_config.dtype
        folder, is_tied = Path(vllm_config.model_config.model).absolute(), _is_tied(vllm_config.model_config)
        wanted = Wanted(shapes(folder, is_tied), is_tied)
        self._serving = self._previous = self._next = LoadedVersion((Link(folder, None),), wanted)
        use_gpu = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        if device.type == "cpu":
            mend_sampling()
        self._pool = ThreadPoolExecutor(1, "staging", initializer=use_gpu)  # a new thread has GPU 0
        self._staging: Future[Staged] | None = None
        self._model = KnownModel()
        is_rounded = vllm_config.model_config.quantization == PER_CHANNEL  # not by who made the folder
        self._kept = KeptTensors(device) if is_rounded else None
        self._copies: LoaderCopies | None = None
        self._is_covered: bool | None = None if self._kept is None else False
        """Whether `LoaderCopies` covers the model; None until a version with digests was loaded."""
        if self._kept is None:
            self._examine_first()
        else:
            log_served(self.model, device)

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing: a folder needs no handshake."""

    def start_weight_update(self) -> None:
        """Forget what an update that did not finish has read; the model does not change."""
        self._staging = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to read. The base class would synchronize an accelerator, which a CPU worker lacks."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Folder) -> None:
        """Begin to read a version; raise ValueError when a file is not the one that was verified."""
        self._next = update_info.version(self._serving.wanted) if update_info.path else self._previous
        check_files(self._next.chain)
        self._staging = self._pool.submit(self._stage, self._next)

    def is_staged(self) -> bool:
        """Return whether all is read; raise ValueError if the version must not be loaded."""
        assert self._staging is not None, "no update was started"
        if not self._staging.done():
            return False
        self._staging.result()
        return True

    def finish_weight_update(self) -> None:
        """Swap the weights in.

        A failure would leave half a model, which must never answer: it ends the process.
        """
        try:
            assert self._staging is not None
            self._swap(self._staging.result())
        except BaseException:
            log.exception("swap failed half-way; ending this engine")
            os._exit(1)
        self._staging = None
        self._previous, self._serving = self._serving, self._next

    def shutdown(self) -> None:
        """Do nothing: no resource is held."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: the learner writes a folder. vLLM 0.26 requires this method of every back end."""
        raise NotImplementedError("the learner publishes weights as a folder and sends nothing")

    def _stage(self, version: LoadedVersion) -> Staged:
        chain, wanted = version.chain, version.wanted
        if self._copies is None or not wanted.has_digests:
            chain = with_files(chain)  # the swap reads them again
            if self._kept is not None and not chain[-1].has_adapters:
                tensors = self._kept.read(replace(version, chain=chain))
                found = Staged(lambda: self._reload(tensors), "quantized", chain)
            else:
                check_chain(chain, wanted, self._device)
                found = Staged(lambda: self._reload(build(chain, wanted, self._device)), "reloaded", chain)
        else:
            found = self._stage_copies(self._copies, version)
        check_files(chain)  # they must not have changed while they were read
        self._synchronize()
        return found

    def _stage_copies(self, copies: LoaderCopies, version: LoadedVersion) -> Staged:
        """Find what changes in this worker's memory; leave it to the swap where that has no room."""
        chain, wanted, rest = version.chain, version.wanted, version.after(self._serving)
        if rest is None and chain[-1].has_adapters:
            self._model.require(chain, wanted, self._device)
        tensors = read_first(chain, wanted) if rest is None else None
        links = chain[1:] if rest is None else rest
        patches: Patches | None = None
        try:
            if tensors is not None and not links:
                patches = copies.compare(tensors)
            elif tensors is None and len(links) == 1 and not links[0].has_adapters:
                patches = copies.read(links[0].folder, wanted)
        except torch.OutOfMemoryError as error:
            log.warning("weights are read in the pause: %s", error)
        whole = tuple(chain if rest is None else rest)
        if patches is not None:
            return Staged(partial(copies.write, patches), "changed values", whole)
        deltas = [Delta.read(link.folder, wanted) for link in links]
        return Staged(partial(_write_one_by_one, copies, tensors, deltas), "copied", whole)

    def _swap(self, staged: Staged) -> None:
        self._synchronize()  # streams of this thread and others wrote and read the same memory
        wanted = self._next.wanted
        staged.write()
        self._synchronize()
        if self._copies is not None and wanted.has_digests:
            self._require_digests(self._copies, wanted)
        elif self._is_covered is None and wanted.has_digests:
            self._find_copies(wanted)
        elif self._kept is not None:
            log_served(self.model, self._device)
        for link in staged.read:
            link.check()  # the files must not have changed while they were read

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._device.type == "cpu":
            _forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(tensors)
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_head(self.model)

    def _examine_first(self) -> None:
        [start] = self._serving.chain
        try:
            tensors = folders.manifest(start.folder, WeightManifest).tensors
        except (FileNotFoundError, CorruptRecord):
            return
        wanted = replace(
            self._serving.wanted,
            dtypes={name: info.dtype for name, info in tensors.items()},
            digests={name: info.digest for name, info in tensors.items()},
        )
        if wanted.has_digests:
            self._serving = LoadedVersion((start,), wanted)
            self._find_copies(wanted)

    def _find_copies(self, wanted: Wanted) -> None:
        self._copies = self._record(wanted)
        self._is_covered = self._copies is not None

    def _record(self, wanted: Wanted) -> LoaderCopies | None:
        try:
            if set((wanted.dtypes or {}).values()) != {str(self._dtype).removeprefix("torch.")}:
                raise ValueError(f"the version is not in {self._dtype}")
            require_plain(self.model)
            copies: LoaderCopies | None = LoaderCopies.record(self.model, wanted.shapes, self._dtype)
        except Exception as error:  # noqa: BLE001  a loader may fail in any way on tensors without data
            log.warning("%s: %s", FALLBACK, error)  # vLLM shows no lower level of ours
            copies = None
        if not all(_gather(copies is not None)) or copies is None:
            return None
        try:
            self._require_digests(copies, wanted)
        except ValueError as error:
            log.warning("%s: %s", FALLBACK, error)
            return None
        return copies

    def _require_digests(self, copies: LoaderCopies, wanted: Wanted) -> None:
        require_digests(copies.digests(_gather), wanted)


def _write_one_by_one(
    copies: LoaderCopies, tensors: dict[str, torch.Tensor] | None, deltas: Sequence[Delta]
) -> None:
    """Write a full version, if there is one, and deltas in their order: the device holds one at a time."""
    if tensors is not None:
        copies.copy(tensors)
    for delta in deltas:
        copies.write(copies.patches(delta))
        copies.merge(delta)


def _gather(value: T) -> list[T]:
    group = get_tp_group()
    values = [value] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


WeightTransferEngineFactory.register_engine(BACKEND, FolderTransfer)


class WorkerExtension:
    """Make workers import this module, which registers the back end; --worker-extension-cls names it."""

    weight_transfer_engine: Any

    def is_staged(self) -> dict[str, bool]:
        """Return whether this worker has read the version that it was told to load; vLLM sends on records."""
        return {"is_staged": self.weight_transfer_engine.is_staged()}

    def used_gpu_memory(self) -> dict[str, int]:
        """Return the bytes of this worker's GPU that all processes together use; 0 without a GPU."""
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        return {"bytes": total - free}


class BearerToken:
    """Guard all routes but /health, as ASGI middleware: vLLM's --api-key leaves the control routes open.

    Behind it an `AnswerGate` keeps back answers of weights that were not compared with their probe yet, and
    a `SampleRoute` answers requests for samples.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app, self._expected = AnswerGate(SampleRoute(app)), f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "lifespan" or scope["path"] == "/health" or self._has_token(scope):
            await self._app(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    def _has_token(self, scope: Scope) -> bool:
        return hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected)
