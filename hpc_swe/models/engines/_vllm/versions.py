"""Name the versions that an engine loads, and keep one as it was published where vLLM quantizes weights.

The scales of a quantized matrix depend on all of its numbers, so that no single value can be changed in it.
For each version vLLM quantizes the published numbers again; a delta changes these in this host's memory.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_swe.models.deltas.tensor_delta import Digests
from hpc_swe.models.engines._vllm.files import Delta, Link, Wanted, build, own_stream, require_digests

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedVersion:
    """Name the folders of a version, and what its manifest says about its tensors."""

    chain: tuple[Link, ...]
    wanted: Wanted

    def after(self, other: "LoadedVersion") -> tuple[Link, ...] | None:
        """Return the deltas that lead here from another version; None if this is none of its successors."""
        count, mine = len(other.chain), [link.folder for link in self.chain]
        return self.chain[count:] if mine[:count] == [link.folder for link in other.chain] else None


class KeptTensors:
    """Keep all tensors of the version that was read last, as it was published."""

    def __init__(self, device: torch.device) -> None:
        """Apply deltas and compute digests on `device`, one tensor at a time."""
        self._device, self._digests = device, Digests(device)
        self._tensors: Mapping[str, Tensor] = {}
        self._kept: LoadedVersion | None = None

    def read(self, version: LoadedVersion) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors of a version, which must hold no adapters; the next call changes them.

        Raise ValueError if a file is wrong, or a digest is not the manifest's.
        """
        rest = version.after(self._kept) if self._kept else None
        self._kept = None  # half-changed tensors are never continued
        if rest is None:
            self._tensors = {}  # frees the memory
            built = build(version.chain, version.wanted, self._device)
            self._tensors = {name: tensor.clone() for name, tensor in built}  # they may be mapped files
        deltas = [Delta.read(link.folder, version.wanted) for link in rest or ()]
        with own_stream(self._device):
            found = {name: self._change(name, tensor, deltas) for name, tensor in self._tensors.items()}
        if version.wanted.has_digests:
            require_digests(found, version.wanted)
        self._kept = version
        return self._tensors.items()

    def _change(self, name: str, tensor: Tensor, deltas: Iterable[Delta]) -> int:
        """Apply deltas to a tensor, and return its digest."""
        part = tensor.to(self._device)
        for delta in deltas:
            delta.apply(name, part)
        tensor.copy_(part)
        return int(self._digests.tensor(part))


def log_served(model: torch.nn.Module, device: torch.device) -> None:
    """Log a digest of all numbers and scales in this worker's memory; engines of a version have the same."""
    computer = Digests(device)
    parts = ((name, part.detach().contiguous()) for name, part in model.named_parameters())  # one at a time
    found = sorted((name, int(computer.tensor(part))) for name, part in parts)
    digest = hashlib.sha256(repr(found).encode()).hexdigest()[:16]
    log.warning("serves quantized weights, whose digest is %s", digest)  # vLLM shows no lower level of ours
