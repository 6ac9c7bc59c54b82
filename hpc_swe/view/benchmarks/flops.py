"""Count the floating-point operations that a training step needs, whatever a back end computes again.

With h hidden, H and G heads and key-value heads times head_dim, f the inner width of an MLP (of the k chosen
experts, with E in all), V the vocabulary, l the length of each sequence, T tokens and n trained tokens:

    forward  = layers (2 T (h (2 H + 2 G) + 3 h f k + h E) + 2 H sum(l^2)) + 2 n h V
    step     = 3 forward

In place of attention a gated delta net with m heads, whose values have the width v and whose keys c, d of
each, has 2 T (h (2 c + 3 v + 2 m) + 3 v d + (2 c + v) kernel): a token reads a state twice and adds to it.
An output that is gated adds h H, and a shared expert of inner width s adds h (3 s + 1).
A product of [m, a] and [a, b] takes 2 m a b. Backward takes twice as many as forward, because each product
has two gradients (Narayanan et al. 2021, arXiv 2104.04473, appendix). Attention has two products, of 2 H l^2
each; the causal mask leaves half of both (the count of FlashAttention's benchmarks: Dao 2023, arXiv
2307.08691, section 4.1). The output layer counts at trained tokens only, because other tokens do not need it.
Where only adapters are trained, the weights of layers and output have no gradient, so their products count 2
times instead of 3, and the small products of the adapters count nothing.
What is computed again in backward counts nothing, nor do norms, rotations, the optimizer and other work on
single elements, but the seconds of all of them count. So the quotient is the model's utilization (MFU:
Chowdhery et al. 2022, arXiv 2204.02311, section 4.1).
"""

from collections.abc import Sequence

from hpc_swe.models.model_shape import ModelShape

DATASHEET = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bfloat16 FLOP/s of a GPU's datasheet, by a part of the name that torch reports."""


def step_flops(
    shape: ModelShape, lengths: Sequence[int], trained: int, *, only_adapters: bool = False
) -> float:
    """Return the FLOPs of forward and backward over sequences of these lengths with `trained` tokens."""
    heads, groups = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    gates = heads if shape.delta else 0
    mlp = 3 * shape.ffn * max(1, shape.experts_per_token) + shape.experts
    mlp += 3 * shape.shared_ffn + bool(shape.shared_ffn)
    mixers = shape.attention_layers * shape.hidden * (2 * heads + 2 * groups + gates)
    if delta := shape.delta:
        around = shape.hidden * (delta.mixed + 2 * delta.values + 2 * delta.value_heads)
        inside = 3 * delta.values * delta.key_dim + delta.mixed * delta.kernel
        mixers += len(delta.layers) * (around + inside)
    products = 2 * sum(lengths) * (mixers + shape.layers * shape.hidden * mlp)
    attention = 2 * heads * sum(length**2 for length in lengths) * shape.attention_layers
    output = 2 * trained * shape.hidden * shape.vocab
    return (2.0 if only_adapters else 3.0) * (products + output) + 3.0 * attention


def datasheet_rate(device: str) -> float | None:
    """Return the FLOP/s of a device's datasheet; None where the device is not listed."""
    return next((rate for name, rate in DATASHEET.items() if name in device), None)
