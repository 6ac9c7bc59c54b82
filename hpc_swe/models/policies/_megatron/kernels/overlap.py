"""Let tensor-parallel ranks exchange activations while they compute products.

Sequence parallelism gathers the inputs of a product, or its gradients, and scatters sums of them. Forward
multiplies some rows while others are on their way. Nothing waits for the gradient of a weight, so backward
puts it off until the next exchange, and computes it then. Ranks that no `RowExchange` connects, such as those
of two nodes, and weights that no gradient is summed for have Megatron's own layers.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from hpc_swe.models.policies._megatron.kernels.compat import add_product
from hpc_swe.models.policies._megatron.kernels.exchange import RowExchange, connect


@dataclass(frozen=True)
class WeightGradient:
    """Hold what the gradient of a weight is computed from."""

    inputs: Tensor
    output_grad: Tensor
    total: Tensor
    """The sum to add it to, float32; autograd gets no gradient of its own to add."""

    def add(self) -> None:
        inputs, grad = self.inputs.contiguous(), self.output_grad.contiguous()
        add_product(inputs.flatten(0, -2), grad.flatten(0, -2), self.total)


class _Waiting:
    """Hold the gradient of one weight at most until the next exchange, or the end of backward."""

    def __init__(self) -> None:
        self._gradient: WeightGradient | None = None

    def put_off(self, gradient: WeightGradient) -> None:
        self.compute()
        self._gradient = gradient
        torch.autograd.Variable._execution_engine.queue_callback(self.compute)

    def compute(self) -> None:
        gradient, self._gradient = self._gradient, None
        if gradient is not None:
            with torch.no_grad():  # autograd calls what is queued without it
                gradient.add()


_waiting = _Waiting()


def install(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the layers of a model that gather or scatter rows use the exchange of a group, if it has one."""
    exchange = connect(group)
    for module in model.modules():
        if isinstance(module, GatheredLinear | ScatteredLinear):
            module.exchange = exchange


class GatheredLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Multiply gathered rows by a weight whose outputs ranks divide."""

    exchange: RowExchange | None = None

    def _forward_impl(self, input: Tensor, weight: nn.Parameter, *args: Any, **kwargs: Any) -> Tensor:
        if self.exchange is None or not _trains(weight):
            found: Tensor = super()._forward_impl(input, weight, *args, **kwargs)
        else:
            found = _GatheredProduct.apply(input, weight, kwargs["bias"], self.exchange)
        return found


class ScatteredLinear(RowParallelLinear):  # type: ignore[misc]
    """Multiply rows by a weight whose inputs ranks divide, and scatter the sums."""

    exchange: RowExchange | None = None

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        if self.exchange is None or not _trains(self.weight):
            product, _ = super().forward(input_)  # none of our layers adds a bias after the sum
            return product, None
        return _ScatteredProduct.apply(input_, self.weight, self.exchange), None


def _trains(weight: nn.Parameter) -> bool:
    return weight.requires_grad and hasattr(weight, "main_grad")


class _GatheredProduct(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, exchange: RowExchange
    ) -> Tensor:
        ctx.exchange, ctx.has_bias = exchange, bias is not None
        ctx.total = weight.main_grad  # hooks of saved tensors would return the weight without it
        ctx.save_for_backward(inputs, weight)
        output = exchange.gathered_product(inputs, weight)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inputs, weight), grad = ctx.saved_tensors, grad.contiguous()
        gathered = ctx.exchange.gather(inputs)
        scattered = ctx.exchange.scatter_product(grad, weight)
        _waiting.put_off(WeightGradient(gathered(), grad, ctx.total))
        of_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        return scattered(), None, of_bias, None


class _ScatteredProduct(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange, ctx.total = exchange, weight.main_grad
        ctx.save_for_backward(inputs, weight)
        return exchange.scattered_product(inputs, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gathered = ctx.exchange.gather(grad)
        _waiting.compute()
        inputs, weight = ctx.saved_tensors  # recomputes them meanwhile
        whole = gathered()
        _waiting.put_off(WeightGradient(inputs, whole, ctx.total))
        return whole.matmul(weight), None, None
