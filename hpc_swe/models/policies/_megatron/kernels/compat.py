"""Repair megatron-core 0.16.1 where it needs Transformer Engine or CUDA.

Each repair names the line of megatron-core that needs it. The second half lets the CPU answer calls to CUDA.
"""

import contextlib
import logging
import queue
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import __version__
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import layers, random
from megatron.core.transformer.moe import moe_utils
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

TESTED = "0.16.1"

log = logging.getLogger(__name__)


# Defects that show whenever Transformer Engine is absent, on CUDA as on a CPU.


def apply() -> None:
    """Make the repairs that are made once per process; without CUDA, make the CPU stand in for it."""
    if __version__ != TESTED:
        log.warning("untested megatron-core %s; tested: %s", __version__, TESTED)
    vars(moe_utils).setdefault("te_general_gemm", None)  # moe_utils.py:1192 reads it though its import failed
    # filesystem_async.py:55 starts a helper process for one answer: it imports the entry module again, takes
    # seconds, and outlives a rank that is killed. We save synchronously, so the answer stays in this process.
    filesystem_async._results_queue = queue.Queue()
    clip_grads.l2_norm_impl = _norm  # utils.py:1205 waits for a GPU once per parameter, and a CPU's is wrong
    if torch.cuda.is_available():
        # layers.py:30 wants Apex for the products that add to float32 gradients; torch has them, too.
        layers._grad_accum_fusion_available = True
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_product)
    if not torch.cuda.is_available():  # the CPU is the device, and recomputation keeps its random state
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.cuda.synchronize = lambda *_args: None
        random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
        random._set_cuda_rng_state = lambda *_args, **_kwargs: None
        torch.cuda.current_stream = lambda *_args, **_kwargs: _STREAM


def add_product(inputs: Tensor, output_grad: Tensor, gradient: Tensor) -> None:
    """Add a weight's gradient, output_grad^T inputs, to its float32 sum, without a tensor in between."""
    if inputs.dtype == gradient.dtype:
        torch.addmm(gradient, output_grad.t(), inputs, out=gradient)
    else:
        torch.ops.aten.addmm.dtype_out(gradient, output_grad.t(), inputs, gradient.dtype, out=gradient)


def _norm(_chunk: int, _flag: object, lists: list[list[Tensor]], *_: object) -> tuple[Tensor, None]:
    tensors = lists[0]
    if not torch.cuda.is_available():  # a CPU's float32 sums lose 1 % of the norm of a tensor of 1e8 values
        tensors = [part for each in tensors for part in each.flatten().split(2**16)]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))[None], None


def mark_shards(model: nn.Module) -> None:
    """Mark the weights that are split over tensor-parallel ranks.

    With perform_initialization=False layers.py skips the marks, and the gradient norm then counts
    only rank 0's shard of every such weight.
    """
    kinds = (layers.VocabParallelEmbedding, layers.ColumnParallelLinear, layers.RowParallelLinear)
    for module in model.modules():
        if isinstance(module, kinds):
            for name, weight in module.named_parameters(recurse=False):
                if not hasattr(weight, "tensor_model_parallel"):
                    dim = 1 if isinstance(module, layers.RowParallelLinear) and name == "weight" else 0
                    split = not isinstance(module, layers.RowParallelLinear) or name == "weight"
                    layers.set_tensor_model_parallel_attributes(weight, split, dim, 1)


def prepare_state(optimizer: MegatronOptimizer) -> None:
    """Give a new torch AdamW its state; distrib_optimizer.py:640 fails on one that never stepped."""
    fuse_steps(optimizer)
    for inner in optimizer.chained_optimizers:
        for group in inner.optimizer.param_groups:
            for param in group["params"]:
                if not inner.optimizer.state[param]:
                    inner.optimizer.state[param] = {
                        "step": torch.zeros((), device=param.device if group["fused"] else "cpu"),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }


def separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its own step count after load_state_dict.

    distrib_optimizer.py gives all parameters the same tensor, so each step would count as many times as
    there are parameters. A fused step counts on the GPU.
    """
    fuse_steps(optimizer)
    for inner in optimizer.chained_optimizers:
        for param, state in inner.optimizer.state.items():
            if torch.is_tensor(state.get("step")):
                place = param.device if param.is_cuda else "cpu"
                state["step"] = state["step"].to(place, torch.float32, copy=True)


def fuse_steps(optimizer: MegatronOptimizer) -> None:
    """Let AdamW on CUDA read and write everything once. Loading replaces this by what was saved."""
    for inner in optimizer.chained_optimizers:
        for group in inner.optimizer.param_groups:
            group["fused"] = torch.cuda.is_available() or None
            group["foreach"] = None


# Calls to CUDA, answered by the CPU.


def cpu_as_cuda() -> contextlib.AbstractContextManager[object]:
    """Create tensors for "cuda" on the CPU, and let them report a CUDA type; with CUDA, change nothing.

    The optimizer's code needs this. It slows down every torch call, so enter it around the optimizer alone.
    """
    return contextlib.nullcontext() if torch.cuda.is_available() else _CpuAsCuda()


class _Stream:
    """Stand for the one order in which a CPU computes."""

    def wait_stream(self, stream: object) -> None:
        """Return at once."""

    def wait_event(self, event: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def record_event(self) -> "_Stream":
        """Return an event that has happened."""
        return self


_STREAM = _Stream()


def new_stream() -> Any:
    """Return a stream of the device; a CPU has one order for all."""
    return torch.cuda.Stream() if torch.cuda.is_available() else _STREAM


def on_stream(stream: Any) -> contextlib.AbstractContextManager[object]:
    """Give what is computed in the block to a stream of `new_stream`."""
    return torch.cuda.stream(stream) if torch.cuda.is_available() else contextlib.nullcontext()


class _CpuAsCuda(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if func is torch.Tensor.cuda:
            return args[0]
        named = dict(kwargs or {})
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        result = func(*args, **named)
        if func is torch.Tensor.type and len(args) == 1:  # asserts compare with torch.cuda.FloatTensor
            return str(result).replace("torch.", "torch.cuda.", 1)
        return result
