"""Build the model: Megatron's decoder with norms, attention, experts and an output layer of our own.

Megatron's modules for these need Transformer Engine, or refuse packed sequences. Ours are plain torch and
the same on CPU and CUDA. The model returns log-probabilities, never logits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from hpc_swe.models.families import Multipliers
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron.kernels import compat
from hpc_swe.models.policies._megatron.kernels.kernels import RMSNorm, ShiftedNorm
from hpc_swe.models.policies._megatron.model import routing
from hpc_swe.models.policies._megatron.model.attention import Attention, GatedAttention, SequenceAttention
from hpc_swe.models.policies._megatron.model.context import ContextAttention, join_trained
from hpc_swe.models.policies._megatron.model.delta_net import GatedDeltaNet
from hpc_swe.models.policies._megatron.model.experts import ExpertLayer, Experts
from hpc_swe.models.policies._megatron.model.layer import DecoderConfig, Layer
from hpc_swe.models.policies._megatron.model.logprobs import linear_logprobs
from hpc_swe.models.policies._megatron.model.packing import Packing
from hpc_swe.models.policies._megatron.model.parallel import DTYPES
from hpc_swe.models.policies._megatron.settings import MegatronSettings


class PolicyModel(GPTModel):  # type: ignore[misc]
    """Compute log-probabilities and entropies: forward(tokens, None, None, packed_seq_params=packing)."""

    chunk = 2048
    multipliers = Multipliers()

    def _preprocess(self, *args: object, **keys: object) -> tuple[Any, ...]:
        hidden, *others = super()._preprocess(*args, **keys)
        if self.pre_process and self.multipliers.embedding != 1:
            hidden = hidden * self.multipliers.embedding
        return hidden, *others

    def _postprocess(
        self, hidden_states: Tensor, packed_seq_params: Packing, **_: object
    ) -> Tensor | tuple[Tensor, Tensor]:
        if not self.post_process:
            return hidden_states  # for the next stage
        group = self.pg_collection.tp
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=True, group=group
        )
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        rows = hidden[:, 0].index_select(0, packed_seq_params.rows)
        sink = weight.main_grad if weight.is_cuda and hasattr(weight, "main_grad") else None
        if self.multipliers.logits != 1:
            rows = rows / self.multipliers.logits  # exact for a power of two
        found = linear_logprobs(rows, weight, packed_seq_params.targets, group, self.chunk, sink)
        return join_trained(found, packed_seq_params, self.pg_collection.cp)


def build_model(shape: ModelShape, settings: MegatronSettings) -> PolicyModel:
    """Build the model on this rank's device; its weights are not initialized."""
    config = _transformer_config(shape, settings)
    layers = [_layer(config) for _ in range(shape.layers // settings.pipeline_parallel)]
    for number in shape.delta.layers if shape.delta else ():
        layers[number].submodules.self_attention = ModuleSpec(module=GatedDeltaNet)
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=_norm(config))
    with compat.cpu_as_cuda():
        model = PolicyModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=shape.vocab,
            max_sequence_length=0,  # positions are rotary, and `Attention` applies them
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="none",
        )
    model.chunk, model.multipliers = settings.logprob_chunk, shape.multipliers
    compat.mark_shards(model)
    if shape.experts:
        routing.install(model)
    return model.cuda() if torch.cuda.is_available() else model


def _transformer_config(shape: ModelShape, settings: MegatronSettings) -> DecoderConfig:
    dtype = DTYPES[settings.dtype]
    return DecoderConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        layernorm_epsilon=shape.eps,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_output_gate=shape.delta is not None,
        delta=shape.delta,
        hetereogenous_dist_checkpoint=shape.delta is not None,
        softmax_scale=shape.multipliers.attention,
        residual_factor=shape.multipliers.residual,
        unrotated=shape.unrotated,
        shared_ffn=shape.shared_ffn,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=settings.tensor_parallel,
        sequence_parallel=settings.tensor_parallel > 1,
        pipeline_model_parallel_size=settings.pipeline_parallel,
        context_parallel_size=settings.context_parallel,
        expert_model_parallel_size=settings.expert_parallel,
        expert_tensor_parallel_size=1 if settings.expert_parallel > 1 else settings.tensor_parallel,
        variable_seq_lengths=settings.pipeline_parallel > 1,
        moe_token_dispatcher_type="alltoall",  # `ExpertLayer` has its own; Megatron refuses others in stages
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=settings.dtype == "bfloat16",
        calculate_per_token_loss=True,  # ranks add up gradients; nothing divides them
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        deterministic_mode=settings.deterministic,
        gradient_accumulation_fusion=torch.cuda.is_available(),
        **_recompute(settings.recompute),
        **(_expert_settings(shape) if shape.experts else {}),
    )


def _expert_settings(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.ffn,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_pre_softmax": not shape.renormalize,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }


def _recompute(kind: str) -> dict[str, Any]:
    if kind == "full":  # Megatron's
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recomputed": "" if kind == "none" else kind}


def _norm(config: DecoderConfig) -> type[RMSNorm]:
    return ShiftedNorm if config.delta else RMSNorm


def _layer(config: DecoderConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    parts, spec.module = spec.submodules, Layer
    parts.self_attention.module = GatedAttention if config.delta else SequenceAttention
    parts.input_layernorm = parts.pre_mlp_layernorm = _norm(config)
    parts.self_attention.submodules.core_attention = (
        ContextAttention if config.context_parallel_size > 1 else Attention
    )
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = _norm(config)
        parts.self_attention.submodules.k_layernorm = _norm(config)
    if config.num_moe_experts:
        parts.mlp.module = ExpertLayer
        parts.mlp.submodules.experts = ModuleSpec(module=Experts)
    parts.sharded_state_dict_keys_map = {}  # checkpoints use the parameters' own names
    return spec
