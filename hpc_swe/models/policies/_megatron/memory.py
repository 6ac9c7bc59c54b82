"""Estimate the memory and the files of a learner, from the model's config.json alone.

The estimate of GPU memory is right to 5 % in the eleven cases of tests/launch/test_estimate.py, and to 10 %
in those of docs/measurements.md.

    P parameters, E of them in experts   L parameters of adapters   h hidden   f inner width
    H, G heads and key-value heads times head_dim
    T tokens of a microbatch   k experts a token
    tp, pp, cp, ep, dp tensor-, pipeline-, context-, expert- and data-parallel sizes

A stage of a pipeline holds as many microbatches as there are stages behind it, so the first one's activations
are those of a microbatch in all layers.
"""

import dataclasses
import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from hpc_swe.models.costs import GIB, MemoryEstimate, Part
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron import counts
from hpc_swe.models.policies._megatron.settings import MegatronSettings
from hpc_swe.models.policies.base import Kept

EVEN_ROUTING = (
    "expert_parallel: the peak is that of even routing; a GPU whose experts get more tokens than others' "
    "takes more"
)
LEVELS = ("none", "elementwise", "products", "full")
"""Values of recompute between which "auto" chooses, the one that takes least time first."""
CROWDED = 1.25
"""Tokens of a GPU's own experts, in a step whose routing is uneven, for each one that it has on average."""
SPARE = 0.15
"""Share of the peak that the allocator may need more, because packs differ in length."""


@dataclasses.dataclass(frozen=True)
class MemoryNeeds:
    """Say what a learner must have room for beside its state."""

    tokens: int = 0
    """Tokens of the longest microbatch; 0 is unknown."""
    kept: Sequence[Kept] = ()


def learner_memory(
    shape: ModelShape, policy: MegatronSettings, data_parallel: int, tokens: int, kept: Sequence[Kept] = ()
) -> MemoryEstimate:
    """Estimate the memory of one rank for microbatches of `tokens` tokens, and of what is `kept` beside it.

    The total is the largest number of bytes in use; the allocator reserves up to 15 % more, and CUDA 1 GiB.

    Megatron's DistributedDataParallel and DistributedOptimizer hold in bfloat16 2 bytes of weight, 4 of
    gradient, and 12 of optimizer state (float32 weight, two moments), the last divided by dp; in float32
    4, 4 and 8. AdamW's fused step needs nothing more. What offload_optimizer moves to host memory passes
    through 1.2 GB at a time when there are no activations.
    With context parallelism dp is dp times cp here, and experts have fewer copies than the rest.
    The reference model is in host memory and takes none here. With adapters these alone have gradients and
    optimizer state, and the weights below them are in host memory, which serve as the reference model, too,
    unless that is another one.

    Where ranks divide the experts, the estimate takes it that the router spreads tokens evenly over them.
    The estimate leaves out float32 attention on CUDA, which has no kernel without score matrices. For
    recompute = "auto" the parts are those of "full" on a GPU, and a note has the peaks of all values.
    """
    if policy.recompute == "auto":
        if policy.gpus:
            return _every_level(shape, policy, data_parallel, tokens, kept)
        policy = replace(policy, recompute="none")
    size, _ = counts.sizes_in_bytes(policy)
    whole, tokens = tokens, -(-tokens // policy.context_parallel)
    held = _states(shape, policy, data_parallel)
    if (base := _last_version(shape, policy, data_parallel, kept, "gpu")).bytes:
        held.append(base)
    saved = tokens * size * shape.layers * _saved(shape, policy, policy.recompute)
    exchanged = 2 if policy.tensor_parallel > 1 else 0  # gathered rows, and sums before they are scattered
    saved += tokens * size * (4 + exchanged) * shape.hidden
    saved += whole * shape.layers * shape.experts_per_token  # choices of the engine, on every rank
    if policy.recompute != "full":  # which makes the routes again in backward
        saved += tokens * shape.layers * _route_bytes(shape, policy)
    layer = tokens * size * _backward(shape, policy)
    moment = max((_output(shape, policy, tokens), "the output layer"), (layer, "a layer's backward"))
    computing = [
        Part("activations", f"recompute = {policy.recompute}, T = {tokens}", saved),
        Part(f"at most: {moment[1]}", f"T = {tokens}", moment[0]),
    ]
    peak = sum(part.bytes for part in held) + saved + moment[0]
    adapters = counts.adapter_parameters(shape, policy)
    return MemoryEstimate(
        f"memory of each learner {'GPU' if policy.gpus else 'rank'}: P = {shape.parameters.total:,}, "
        + ", ".join(
            f"{name} = {ranks}" for name, ranks in _sizes(policy).items() if ranks > 1 or name == "tp"
        )
        + f", dp = {data_parallel}",
        [*held, *computing],
        Part("peak", "without the allocator's 15 %", peak),
        [f"L = {adapters:,} parameters of adapters"] * bool(adapters)
        + [EVEN_ROUTING] * (policy.expert_parallel > 1),
        [part for part in _on_host(shape, policy, data_parallel, kept) if part.bytes],
        peak,
    )


def _on_host(
    shape: ModelShape, policy: MegatronSettings, data_parallel: int, kept: Sequence[Kept]
) -> list[Part]:
    """Return what a rank takes of the host; of the initial model adapters leave a copy anyway."""
    size, states = counts.sizes_in_bytes(policy)
    adapters, stepped = counts.adapter_parameters(shape, policy), counts.stepped(shape, policy, data_parallel)
    weights, _, optimizer = _formulas(shape, policy, data_parallel)
    share = policy.offload_optimizer
    is_copied = "other reference" in kept or ("initial model" in kept and not adapters)
    return [
        Part("optimizer", f"{share:.4g} x {optimizer}", share * states * stepped),
        Part(
            "weights below adapters",
            f"{size} P / tp, experts / ep, adapted layers",
            size * counts.adapted_parameters(shape, policy),
        ),
        Part(
            "reference, and policy meanwhile", f"2 x {weights}", reference_memory(shape, policy) * is_copied
        ),
        _last_version(shape, policy, data_parallel, kept, "host"),
    ]


def _last_version(
    shape: ModelShape, policy: MegatronSettings, data_parallel: int, kept: Sequence[Kept], place: str
) -> Part:
    """Return the values that deltas start from, if they are there; adapters start from the model's folder."""
    is_there = "last version" in kept and policy.delta_base == place and not policy.lora_rank
    size, count = counts.sizes_in_bytes(policy)[0], counts.stepped(shape, policy, data_parallel)
    return Part("last version, for deltas", f"{size} P / processes", size * count * is_there)


def _states(shape: ModelShape, policy: MegatronSettings, data_parallel: int) -> list[Part]:
    count, adapters = counts.held(shape, policy), counts.adapter_parameters(shape, policy)
    size, states = counts.sizes_in_bytes(policy)
    weights, gradients, optimizer = _formulas(shape, policy, data_parallel)
    kept = 1 - policy.offload_optimizer
    return [
        Part("weights", weights, size * (count + adapters)),
        Part("gradients", gradients, 4 * (adapters or count)),
        Part(
            "optimizer",
            f"{f'{kept:.4g} x ' * (kept < 1)}{optimizer}",
            kept * states * counts.stepped(shape, policy, data_parallel),
        ),
    ]


def _formulas(shape: ModelShape, policy: MegatronSettings, data_parallel: int) -> tuple[str, str, str]:
    count, adapters = counts.held(shape, policy), counts.adapter_parameters(shape, policy)
    size, states = counts.sizes_in_bytes(policy)
    share = "P / tp" if policy.expert_parallel == 1 else "((P - E) / tp + E / ep)"
    share += " / pp" if policy.pipeline_parallel > 1 else ""
    trained = "L" if adapters else share
    copies = "dp" if policy.context_parallel == 1 else "(dp cp)"
    is_divided = counts.stepped(shape, policy, data_parallel) < (adapters or count)
    whole = f"({share} + L)" if adapters else share
    return f"{size} {whole}", f"4 {trained}", f"{states} {trained}{f' / {copies}' * is_divided}"


def _every_level(
    shape: ModelShape, policy: MegatronSettings, data_parallel: int, tokens: int, kept: Sequence[Kept]
) -> MemoryEstimate:
    levels = {level: replace(policy, recompute=level) for level in LEVELS}
    needs = MemoryNeeds(tokens, kept)
    peaks = {level: peak_bytes(shape, each, data_parallel, needs) for level, each in levels.items()}
    least = learner_memory(shape, levels["full"], data_parallel, tokens, kept)
    listed = ", ".join(f"{level} {peak / GIB:.1f}" for level, peak in peaks.items())
    note = f"recompute = auto takes the fastest value that fits; peaks in GiB: {listed}"
    choices = recompute_choices(shape, policy, data_parallel, needs)
    return dataclasses.replace(least, notes=[*least.notes, note], choices=choices)


def peak_bytes(shape: ModelShape, policy: MegatronSettings, data_parallel: int, needs: MemoryNeeds) -> float:
    """Return the total of `learner_memory`."""
    found = learner_memory(shape, policy, data_parallel, needs.tokens, needs.kept)
    return sum(part.bytes for part in found.parts)


def cheapest_recompute(
    shape: ModelShape, policy: MegatronSettings, data_parallel: int, needs: MemoryNeeds, free: float
) -> str:
    """Return the value of recompute that takes least time of those that fit; where none fits, "full"."""
    choices = recompute_choices(shape, policy, data_parallel, needs)
    return next((level for level, needed in choices.items() if needed <= free), "full")


def recompute_choices(
    shape: ModelShape, policy: MegatronSettings, data_parallel: int, needs: MemoryNeeds
) -> dict[str, float]:
    """Return the bytes that must be free for each value of recompute, the one that takes least time first.

    These are the peak, SPARE and 1 GiB for CUDA's libraries; where ranks divide the experts, with CROWDED
    ones.
    """
    rows = math.ceil(shape.experts_per_token * (CROWDED if policy.expert_parallel > 1 else 1))
    crowded = dataclasses.replace(shape, experts_per_token=rows)

    def needed(level: str) -> float:
        chosen = replace(policy, recompute=level)
        return (1 + SPARE) * peak_bytes(crowded, chosen, data_parallel, needs) + GIB

    return {level: needed(level) for level in LEVELS}


def reference_memory(shape: ModelShape, policy: MegatronSettings) -> float:
    """Return the bytes of host memory that each rank pins for the weights of reference and policy."""
    size = 2 if policy.dtype == "bfloat16" else 4
    return 2.0 * size * counts.held(shape, policy)


def _sizes(policy: MegatronSettings) -> dict[str, int]:
    return {
        "tp": policy.tensor_parallel,
        "pp": policy.pipeline_parallel,
        "ep": policy.expert_parallel,
        "cp": policy.context_parallel,
    }


def files(shape: ModelShape, policy: MegatronSettings) -> tuple[Part, Part]:
    """Return one exported version and one checkpoint."""
    count, state = shape.parameters.total, counts.saved_bytes(policy)
    size, _ = counts.sizes_in_bytes(policy)
    if policy.lora_rank:
        alone = msgspec.structs.replace(policy, tensor_parallel=1, expert_parallel=1)
        adapters = counts.adapter_parameters(shape, alone)
        whole = Part("weights/", f"{size} (P + L)", size * (count + adapters))
        return whole, Part("checkpoints/", f"{state} L", state * adapters)
    return Part("weights/", f"{size} P", size * count), Part("checkpoints/", f"{state} P", state * count)


def _saved(shape: ModelShape, policy: MegatronSettings, recompute: str) -> float:
    """Return how many numbers a token and layer keep for backward.

    Without recomputation: the residual stream before and after each norm, 4 h (over
    tp); attention's q, k, v as one, q, k and v rotated, its output twice, 4 H + 4 G; the
    MLP's 3 f, or with experts the routed tokens and four inner widths, k (h + 4 f), and of a shared one 3 f
    and its output. Of these, elementwise keeps the results of matrix products and of attention; products
    the layer's input and attention's output; full the layer's input. With
    context parallelism, elementwise and products keep what ranks exchanged, too, 2 H + 2 G.
    """
    tp = policy.tensor_parallel
    residual = shape.hidden / tp
    mixer = _saved_of_mixer(shape, policy, recompute)
    whole, products = 3 * shape.ffn / tp, 2 * shape.ffn / tp
    if shape.experts:
        # Where ranks divide the experts, each computes as many rows as its own tokens have on all ranks.
        k, apart = shape.experts_per_token, policy.expert_parallel > 1
        products = 2 * k * shape.ffn / tp
        whole = 2 * products + k * shape.hidden / (tp if apart else 1)
        products, whole = products + 2 * shape.shared_ffn / tp, whole + 3 * shape.shared_ffn / tp
    gated = residual * bool(shape.shared_ffn)
    around = {
        "none": 4 * residual + whole + gated,
        "elementwise": 2 * residual + products + gated,
        "products": residual + gated,
        "full": residual,
    }
    return mixer + around[recompute]


def _saved_of_mixer(shape: ModelShape, policy: MegatronSettings, recompute: str) -> float:
    """Return how many numbers a token keeps of attention or of a delta net, the mean of all layers.

    Of c keys, v values and m heads, a delta net has 2 c + 2 v + 2 m as one, and its kernels keep 2 c + v
    after the convolution, normed keys and queries, values, m rows of a chunk, and what they return. Plain
    torch keeps several times as much.
    """
    heads, groups = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    exchanged = 2 * (heads + groups) if policy.context_parallel > 1 else 0
    gates = heads if shape.delta else 0  # of attention's output, beside delta nets
    numbers = {
        "none": 4 * heads + 4 * groups + 2 * gates,
        "elementwise": 2 * heads + 2 * groups + exchanged + 3 * gates,
        "products": heads + exchanged + 2 * gates,
        "full": 0,
    }[recompute] * shape.attention_layers
    if delta := shape.delta:
        projected = delta.mixed + delta.values + 2 * delta.value_heads
        inside = delta.mixed + 2 * delta.keys + 2 * delta.values + 64 * delta.value_heads
        numbers += {
            "none": projected + inside + delta.values,
            "elementwise": projected + inside,
            "products": inside + delta.values,
            "full": 0,
        }[recompute] * len(delta.layers)
    return numbers / shape.layers / policy.tensor_parallel


def _widths(shape: ModelShape) -> tuple[float, float]:
    """Return H and G, the means of all layers.

    A delta net counts as attention with its values as H and its keys as G.
    """
    heads, groups = float(shape.heads * shape.head_dim), float(shape.groups * shape.head_dim)
    if shape.delta is None:
        return heads, groups
    share = shape.attention_layers / shape.layers
    values, keys = shape.delta.values, shape.delta.keys
    return share * heads + (1 - share) * values, share * groups + (1 - share) * keys


def _route_bytes(shape: ModelShape, policy: MegatronSettings) -> float:
    """Return the bytes by which dispatch.Route keeps, for a token and layer, where its choices are computed.

    They are 8 for the order and 4 for the place of each choice of all ranks that share experts, and 4 for
    each row that this rank computes. With tensor parallelism each rank has a part of the tokens here.
    """
    ranks = policy.expert_parallel if policy.expert_parallel > 1 else policy.tensor_parallel
    rows = 1 if policy.expert_parallel > 1 else ranks
    return (
        shape.experts_per_token * (12 * ranks + 4 * rows) / policy.tensor_parallel if shape.experts else 0.0
    )


def _backward(shape: ModelShape, policy: MegatronSettings) -> float:
    """Return how many numbers a token makes in one layer's backward, of the MLP or of attention.

    The MLP's are recomputed ones and gradients; with experts also the routed tokens, their gradients, what
    the experts return for them, and the tokens of all ranks that share the experts. Attention's are q, k and
    v, their gradients, the same in float32, and the gradient of its output: 5 H + 8 G, without the MLP's.
    """
    heads, groups = (width / policy.tensor_parallel for width in _widths(shape))
    late = 2 * shape.hidden if policy.tensor_parallel > 1 else 0  # gathered rows and their gradients
    return late + max(_backward_of_mlp(shape, policy), 5 * heads + 8 * groups + shape.hidden)


def _backward_of_mlp(shape: ModelShape, policy: MegatronSettings) -> float:
    inner = shape.ffn / policy.tensor_parallel * max(1, shape.experts_per_token)
    apart = policy.tensor_parallel if policy.expert_parallel > 1 else 1
    ranks = policy.expert_parallel if policy.expert_parallel > 1 else policy.tensor_parallel
    routed = (2 * shape.experts_per_token + ranks) * shape.hidden / apart if shape.experts else 0.0
    if policy.recompute == "elementwise":
        again = shape.experts_per_token * shape.hidden / apart
        return 4 * inner + shape.hidden + routed + again
    if policy.recompute == "products":  # the MLP's are gone when attention's are made
        return 6 * inner + 2 * shape.hidden + routed
    return _saved(shape, policy, "none") - _saved(shape, policy, policy.recompute) + 3 * inner + routed


def _output(shape: ModelShape, policy: MegatronSettings, tokens: int) -> float:
    """Return the bytes that logprobs.py works with: a chunk's float32 logits, and their gradient."""
    size = 2 if policy.dtype == "bfloat16" else 4
    return shape.vocab / policy.tensor_parallel * min(policy.logprob_chunk, tokens) * (4 + size)
