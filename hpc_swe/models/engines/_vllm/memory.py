"""Estimate from a model's config.json whether vLLM can serve it, and with how much memory."""

import math
from pathlib import Path
from typing import NamedTuple

from hpc_swe.base.errors import ConfigError
from hpc_swe.models.costs import GIB, MemoryEstimate, Part
from hpc_swe.models.model_shape import ModelShape, has_delta_nets, read_config
from hpc_swe.models.rope import is_yarn, longest_context


class Sizes(NamedTuple):
    """Hold the bytes of a number in memory."""

    weight: int
    """Of weights, and of states; 1 where matrices alone are quantized, as in no model with states."""
    cached: int
    """Of cached keys and values."""


def check(model: Path, tensor_parallel: int, context: int) -> None:
    """Check that ranks divide the model's heads, and that the model takes contexts of this length."""
    known = read_config(model)
    heads, longest = known.get("num_attention_heads", 0), longest_context(known)
    ranks = (
        f"engine.tensor_parallel = {tensor_parallel} does not divide the model's {heads} attention heads; "
        "choose a number that does"
    )
    given, remedy = "max_position_embeddings", "lower it"
    if is_yarn(known):
        given = "min(max_position_embeddings, original_max_position_embeddings * factor)"
        remedy = "lower it, or see docs/models.md on YaRN"
    length = f"rollout.context = {context} is over the model's {given} = {longest}; {remedy}"
    found = [ranks] * bool(heads % tensor_parallel) + [length] * (0 < longest < context)
    if found:
        raise ConfigError("\n".join(found))


def check_coarse(model: Path, *, weights: bool, cache: bool) -> None:
    """Check that a model can be served with 8 bits for a weight, and for a cached key or value."""
    if weights and (has_delta_nets(read_config(model)) or ModelShape.read(model).experts):
        raise ConfigError(
            "engine.dtype = 'fp8_e4m3' needs a model without experts and delta nets; use 'bfloat16'"
        )
    if cache and ModelShape.read(model).qkv_bias:
        raise ConfigError(
            "engine.kv_cache_dtype = 'fp8_e4m3' needs a model whose keys have no biases: a large one (354 in "
            "Qwen2.5-Coder-1.5B) is rounded by up to 16, so that noise is sampled; use 'auto'"
        )


def cached_token(shape: ModelShape, tensor_parallel: int, size: int) -> int:
    """Return the bytes of key-value cache per token and rank: a key and a value in each layer of attention.

    A number takes `size` bytes. A rank holds at least one whole head.
    """
    heads = math.ceil(shape.groups / tensor_parallel)
    return 2 * shape.attention_layers * heads * shape.head_dim * size


def states(shape: ModelShape, tensor_parallel: int, size: int) -> int:
    """Return the bytes that a sequence of any length takes in delta nets: float32 states, and past tokens."""
    if shape.delta is None:
        return 0
    delta = shape.delta
    each = 4 * delta.values * delta.key_dim + size * delta.mixed * (delta.kernel - 1)
    return each * len(delta.layers) // tensor_parallel


def estimate(
    shape: ModelShape, tensor_parallel: int, sizes: Sizes, *, sequences: int, context: int, given: int
) -> MemoryEstimate:
    """Estimate the memory of one rank.

    The key-value cache has the `given` bytes, or where they are 0 those that `sequences` conversations of
    `context` tokens would fill, of which one must have room.
    """
    token, size = cached_token(shape, tensor_parallel, sizes.cached), sizes.weight
    state = states(shape, tensor_parallel, size)
    tables = shape.parameters.tables // tensor_parallel if size == 1 else 0  # they keep 16 bits
    weights = Part("weights", f"{size} P / tp", size * shape.parameters.of_rank(tensor_parallel) + tables)
    note = f"KV cache: {token:,} bytes a token, {GIB // token:,} tokens a GiB"
    note += f"; {state:,} bytes a sequence beside them" * bool(state)
    title = f"memory of each engine GPU: tp = {tensor_parallel}"
    host = [Part("published weights", "2 P", 2 * shape.parameters.total)] * (size == 1)  # see versions.py
    if given:
        tokens = given // token
        cache = Part(
            "KV cache, as configured", f"{tokens:,} tokens: {tokens // context} full contexts", given
        )
        both = Part("both", "", weights.bytes + given)
        return MemoryEstimate(title, [weights, cache], both, [note], host, least=both.bytes)
    formula = f"{sequences} sequences x {context:,} tokens x {token:,} bytes"
    cache = Part("KV cache, if all were full", formula, sequences * (context * token + state))
    least = weights.bytes + context * token + state
    notes = [f"{note}; vLLM takes what it finds free"]
    return MemoryEstimate(title, [weights, cache], None, notes, host, least=least)
