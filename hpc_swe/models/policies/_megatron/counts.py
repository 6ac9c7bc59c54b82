"""Count the parameters that a rank holds and trains, and the bytes of each; without torch."""

from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron.settings import MegatronSettings


def sizes_in_bytes(policy: MegatronSettings) -> tuple[int, int]:
    """Return the bytes of a weight, and of the optimizer's state of one."""
    return (2, 12) if policy.dtype == "bfloat16" else (4, 8)


def saved_bytes(policy: MegatronSettings) -> int:
    """Return what a parameter takes in a checkpoint; Megatron's optimizer saves float32 weights twice."""
    return sum(sizes_in_bytes(policy)) + 4 * (policy.dtype == "float32")


def parts(shape: ModelShape, policy: MegatronSettings) -> tuple[float, float]:
    """Return a rank's parameters of its largest stage, and its part of the experts'."""
    known, tp, pp = shape.parameters, policy.tensor_parallel, policy.pipeline_parallel
    tables = known.tables if pp == 1 else shape.vocab * shape.hidden
    ranks = policy.expert_parallel if policy.expert_parallel > 1 else tp
    return (tables + known.split / pp) / tp + known.whole / pp, known.experts / pp / ranks


def held(shape: ModelShape, policy: MegatronSettings) -> float:
    """Return the parameters of a rank of the largest stage."""
    return sum(parts(shape, policy))


def stepped(shape: ModelShape, policy: MegatronSettings, data_parallel: int) -> float:
    """Return how many parameters a rank's optimizer updates."""
    copies = policy.context_parallel * data_parallel
    dense, experts = _adapter_parts(shape, policy) if policy.lora_rank else parts(shape, policy)
    of_experts = copies * policy.tensor_parallel / policy.expert_parallel
    return dense / copies + experts / (of_experts if policy.expert_parallel > 1 else copies)


def adapter_parameters(shape: ModelShape, policy: MegatronSettings) -> int:
    """Return the parameters of a rank's adapters, each of rank * (inputs + outputs), one of them divided."""
    return int(sum(_adapter_parts(shape, policy)))


def _adapter_parts(shape: ModelShape, policy: MegatronSettings) -> tuple[int, float]:
    tp, ep, found = policy.tensor_parallel, policy.expert_parallel, 0
    for layers, inputs, outputs, is_row in _adapted(shape, policy):
        found += layers * (inputs // tp + outputs if is_row else inputs + outputs // tp)
    inner = shape.ffn if ep > 1 else shape.ffn // tp
    experts = _adapted_experts(shape, policy) / ep * 3 * (shape.hidden + inner)
    return policy.lora_rank * found, policy.lora_rank * experts


def adapted_parameters(shape: ModelShape, policy: MegatronSettings) -> float:
    """Return the parameters of a rank's matrices that have adapters."""
    sizes = (layers * inputs * outputs for layers, inputs, outputs, _ in _adapted(shape, policy))
    experts = _adapted_experts(shape, policy) * 3 * shape.hidden * shape.ffn
    ranks = policy.expert_parallel if policy.expert_parallel > 1 else policy.tensor_parallel
    return sum(sizes) / policy.tensor_parallel + experts / ranks


def _adapted_experts(shape: ModelShape, policy: MegatronSettings) -> int:
    has_some = policy.lora_rank and policy.lora_layers != "attention"
    return shape.layers * shape.experts if has_some else 0


def _adapted(shape: ModelShape, policy: MegatronSettings) -> list[tuple[int, int, int, bool]]:
    """Return the number of layers that have such a matrix, its inputs and outputs, and which ranks divide."""
    heads, groups, hidden = shape.heads * shape.head_dim, shape.groups * shape.head_dim, shape.hidden
    queries, count = heads * (2 if shape.delta else 1), shape.attention_layers
    columns = [queries + 2 * groups] if shape.has_fused_qkv else [queries, groups, groups]
    attention = [(count, hidden, outputs, False) for outputs in columns]
    attention += [(count, heads, hidden, True)]
    if shape.delta:
        values, count = shape.delta.values, len(shape.delta.layers)
        attention += [(count, hidden, outputs, False) for outputs in (shape.delta.mixed, values)]
        attention += [(count, values, hidden, True)]
    ffn = shape.shared_ffn if shape.experts else shape.ffn
    mlp = [(shape.layers, hidden, ffn, False)] * 2 + [(shape.layers, ffn, hidden, True)] if ffn else []
    chosen = {"all": attention + mlp, "attention": attention, "mlp": mlp}
    return chosen[policy.lora_layers] if policy.lora_rank else []
