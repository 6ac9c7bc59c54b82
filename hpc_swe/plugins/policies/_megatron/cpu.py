"""What differs without CUDA, and nothing else: stand-ins for calls that megatron-core makes to CUDA.

`apply` replaces four functions once. `as_cuda` redirects tensors that optimizer code puts on
"cuda"; it slows every torch call down, so it is entered around the optimizer alone.
"""

import contextlib
from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode


def apply() -> None:
    """Let the current CUDA device be the CPU, and recomputation keep the CPU's random state."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_args: None
    random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_args, **_kwargs: None


def as_cuda() -> contextlib.AbstractContextManager[object]:
    """Tensors made on "cuda" land on the CPU and call themselves CUDA tensors. With CUDA: nothing."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _AsCuda()


class _AsCuda(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch.Tensor.cuda:
            return args[0]
        named = dict(kwargs or {})
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        result = func(*args, **named)
        if func is torch.Tensor.type and len(args) == 1:  # asserts compare with torch.cuda.FloatTensor
            return str(result).replace("torch.", "torch.cuda.", 1)
        return result
