"""Keep a share of the optimizer's state in host memory, and pass it through the device in each step.

A step takes chunks of master weights and moments one after another. While AdamW updates one chunk, the next
one is on its way to the device and the last one on its way back, so the bus works in both directions. AdamW
treats every element alone, so the step gives the same bits as one whose state stays on the device.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.optim.adam import adam

from hpc_swe.models.policies._megatron.kernels import pinned
from hpc_swe.models.policies._megatron.kernels.compat import new_stream, on_stream
from hpc_swe.models.policies._megatron.model.parallel import TorchRanks, device

KEY = "policy.offload_optimizer"
MOMENTS = ("exp_avg", "exp_avg_sq")
LONGEST = 2**25
"""Most elements of a chunk: 400 MB of state, which take 8 ms on a bus of 50 GB/s."""
FEWEST = 16
"""Fewest chunks that a large enough state is divided into; copies of the first and the last one are alone."""
ALIGNED = 1024
"""Each piece but a parameter's last has a multiple of so many elements, as vector instructions need."""
SLOTS = 3
"""Chunks on the device at a time: one arrives, one is updated, and one leaves."""
OPTIONS = ("lr", "weight_decay", "eps", "foreach", "fused", "amsgrad", "maximize", "decoupled_weight_decay")


@dataclass(frozen=True)
class Hosted:
    """Locate a parameter whose state is in host memory."""

    group: int
    param: Tensor
    """The optimizer's parameter, float32 [shard]. A master weight has no bytes here."""
    first: int
    """Where its elements begin in host memory."""


@dataclass(frozen=True)
class Piece:
    """Name consecutive elements of a parameter."""

    of: Hosted
    start: int
    end: int

    def place(self, chunk: "Chunk") -> slice:
        """Return where the piece lies within a chunk."""
        shift = self.of.first - chunk.first
        return slice(shift + self.start, shift + self.end)


@dataclass(frozen=True)
class Chunk:
    """Hold pieces of one group of parameters that lie side by side in host memory."""

    pieces: list[Piece]

    @property
    def group(self) -> int:
        return self.pieces[0].of.group

    @property
    def first(self) -> int:
        """Return where the chunk begins in host memory."""
        return self.pieces[0].of.first + self.pieces[0].start

    @property
    def end(self) -> int:
        return self.pieces[-1].of.first + self.pieces[-1].end


def host_states(optimizer: MegatronOptimizer, share: float, ranks: TorchRanks) -> None:
    """Move `share` of the optimizer's state to host memory, where its steps and checkpoints find it.

    Raise NodeError on all ranks if the memory of a node is too small.
    """
    parts = [HostedStates(inner, share) for inner in optimizer.chained_optimizers]
    room = pinned.take(KEY, sum(part.bytes for part in parts), ranks, "choose a smaller share")
    for part in parts:
        part.move(room)


def choose(groups: Sequence[dict[str, Any]], share: float) -> list[tuple[int, Tensor]]:
    """Choose parameters that have at most `share` of all elements, large ones first; in order of groups."""
    every = [(index, param) for index, group in enumerate(groups) for param in group["params"]]
    left = share * sum(param.numel() for _, param in every)
    chosen = []
    for index, param in sorted(every, key=lambda each: -each[1].numel()):
        if param.numel() <= left:
            left -= param.numel()
            chosen.append((index, param))
    return sorted(chosen, key=lambda each: each[0])


def divide(hosted: Sequence[Hosted], longest: int) -> list[Chunk]:
    """Divide parameters into chunks of about `longest` elements at most, each of one group."""
    longest = _aligned(longest)
    chunks: list[Chunk] = []
    for each in hosted:
        count = each.param.numel()
        for start in range(0, count, longest):
            piece = Piece(each, start, min(start + longest, count))
            last = chunks[-1] if chunks else None
            if last and last.group == each.group and each.first + piece.end - last.first <= longest:
                last.pieces.append(piece)
            else:
                chunks.append(Chunk([piece]))
    return chunks


class HostedStates:
    """Hold a share of one optimizer's state, and take its steps."""

    def __init__(self, owner: DistributedOptimizer, share: float) -> None:
        """Choose the parameters; nothing moves before `move`."""
        self._reference = weakref.ref(owner)  # the owner refers to this, and must go when nobody uses it
        groups = zip(owner.shard_fp32_from_float16_groups, owner.shard_float16_groups, strict=True)
        pairs = [zip(masters, weights, strict=True) for masters, weights in groups]
        self._weights: dict[Tensor, Tensor] = {master: weight for each in pairs for master, weight in each}
        """Master weight -> the same elements of the model; empty where a float32 model has none."""
        self._hosted: list[Hosted] = []
        self._total = 0
        for group, param in choose(self._adamw.param_groups, share):
            self._hosted.append(Hosted(group, param, self._total))
            self._total += _aligned(param.numel())
        self._chunks = divide(self._hosted, min(LONGEST, self._total // FEWEST))
        self._arriving, self._leaving = new_stream(), new_stream()
        self._names = (*(("param",) if self._weights else ()), *MOMENTS)
        self._host: dict[str, Tensor] = {}
        self._views: dict[Tensor, dict[str, Tensor]] = {}
        """Parameter -> its elements in host memory."""

    @property
    def _owner(self) -> DistributedOptimizer:
        return self._reference()

    @property
    def _adamw(self) -> torch.optim.AdamW:
        return self._owner.optimizer

    @property
    def bytes(self) -> int:
        """Return the size of the host memory."""
        return pinned.room_for([4 * self._total]) * len(self._names)

    def move(self, room: pinned.HostRoom) -> None:
        """Move master weights, begin with moments of 0, and take over what steps and checkpoints call."""
        self._host = {name: room.place([self._total], torch.float32) for name in self._names}
        for each in self._hosted:
            param, end = each.param, each.first + each.param.numel()
            self._views[param] = {name: host[each.first : end] for name, host in self._host.items()}
            moments = {name: _without_bytes(torch.empty_like(param)) for name in MOMENTS}
            self._adamw.state[param] = {"step": torch.zeros((), device=param.device), **moments}
            if self._weights:
                self._views[param]["param"].copy_(param)
                _without_bytes(param)
        self._adamw.step = self.step
        self._owner._copy_main_params_to_model_params = self._copy_resident
        self._owner._get_main_param_and_optimizer_states = self._states

    def step(self) -> None:
        """Take a step of AdamW; the gradients are ready."""
        gradients = [each.param.grad for each in self._hosted]
        for each in self._hosted:
            each.param.grad = None  # so that the optimizer's own step leaves it out
        type(self._adamw).step(self._adamw)
        for each, gradient in zip(self._hosted, gradients, strict=True):
            each.param.grad = gradient
        if self._chunks:
            self._stream()
            torch._foreach_add_([self._adamw.state[each.param]["step"] for each in self._hosted], 1)

    def _stream(self) -> None:
        here, count = torch.cuda.current_stream(), len(self._chunks)
        longest = max(chunk.end - chunk.first for chunk in self._chunks)
        slots = [
            {name: torch.empty(longest, device=device()) for name in self._names}
            for _ in range(min(SLOTS, count))
        ]
        self._arriving.wait_stream(here)  # which may still use the memory of the slots
        arrived, left = [self._fetch(self._chunks[0], slots[0])], list[Any]()
        for index, chunk in enumerate(self._chunks):
            ahead = index + 1
            if ahead < count:
                if ahead >= SLOTS:
                    self._arriving.wait_event(left[ahead - SLOTS])
                arrived.append(self._fetch(self._chunks[ahead], slots[ahead % SLOTS]))
            here.wait_event(arrived[index])
            self._update(chunk, slots[index % SLOTS])
            self._leaving.wait_event(here.record_event())
            left.append(self._put_back(chunk, slots[index % SLOTS]))
        here.wait_stream(self._leaving)

    def _fetch(self, chunk: Chunk, slot: dict[str, Tensor]) -> Any:
        with on_stream(self._arriving):
            for name, host in self._host.items():
                part = host[chunk.first : chunk.end]
                slot[name][: len(part)].copy_(part, non_blocking=True)
        return self._arriving.record_event()

    def _put_back(self, chunk: Chunk, slot: dict[str, Tensor]) -> Any:
        with on_stream(self._leaving):
            for name, host in self._host.items():
                part = host[chunk.first : chunk.end]
                part.copy_(slot[name][: len(part)], non_blocking=True)
        return self._leaving.record_event()

    def _update(self, chunk: Chunk, slot: dict[str, Tensor]) -> None:
        """Let AdamW update a chunk on the device, and copy its master weights to the model."""
        group, pieces = self._adamw.param_groups[chunk.group], chunk.pieces
        params = [piece.of.param for piece in pieces]
        places = [slice(piece.start, piece.end) for piece in pieces]
        staged = {name: [whole[piece.place(chunk)] for piece in pieces] for name, whole in slot.items()}
        masters = staged.get("param") or [param[place] for param, place in zip(params, places, strict=True)]
        adam(
            masters,
            [param.grad[place] for param, place in zip(params, places, strict=True)],
            *(staged[name] for name in MOMENTS),
            [],
            [self._adamw.state[param]["step"].clone() for param in params],
            grad_scale=vars(self._adamw).get("grad_scale"),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            **{key: group[key] for key in OPTIONS},
        )
        if self._weights:
            weights = [self._weights[param][place] for param, place in zip(params, places, strict=True)]
            torch._foreach_copy_(weights, masters)

    def _copy_resident(self) -> None:
        """Copy the master weights that are on the device to the model, in place of Megatron's method."""
        resident = [(weight, param) for param, weight in self._weights.items() if param not in self._views]
        for weight, param in resident:
            weight.copy_(param)

    def _states(self, weight: torch.nn.Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter of the model, wherever it is, in place of Megatron's method."""
        torch.cuda.synchronize()  # a copy to host memory may be under way
        group, order = self._owner.model_param_group_index_map[weight]
        param = self._adamw.param_groups[group]["params"][order]
        return {"param": param, **self._adamw.state[param], **self._views.get(param, {})}


def _without_bytes(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def _aligned(count: int) -> int:
    return max(1, -(-count // ALIGNED)) * ALIGNED
