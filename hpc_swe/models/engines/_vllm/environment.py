"""Build the environment of vLLM's processes, and name what both of its sides know."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_swe.base.errors import ConfigError
from hpc_swe.models.model_shape import has_delta_nets

TOKEN = "HPC_SWE_ENGINE_TOKEN"
"""Variable with the token that every route asks for."""
BACKEND = "hpc_swe_folder"
"""Back end of weight transfers that the extension adds to vLLM."""
FP8 = "fp8_e4m3"
"""Type of weights that are quantized from the learner's."""
PER_CHANNEL = "fp8_per_channel"
"""How vLLM quantizes them: a scale for each row."""
NOT_INHERITED = ("VLLM_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def require_sound(arguments: Sequence[str]) -> None:
    """Raise ConfigError for CUDA graphs with which vLLM 0.26 sampled noise; docs/result.md has figures.

    So for numbers that vLLM rounds in a way of which probes and objectives are not told.
    """
    full = r"cudagraph_mode\W+(FULL|2)\b"  # vLLM takes the name in any case, or its number
    if re.search(full, " ".join(arguments), re.IGNORECASE):
        raise ConfigError(
            "[engine.extra] has cudagraph_mode FULL: with graphs of steps that read prompts, engines sampled "
            "noise at times; write FULL_DECODE_ONLY, or leave it to vLLM"
        )
    if found := [word for word in arguments if re.match(r"-q|--(quant|dtype|kv.cache.dtype)", word)]:
        raise ConfigError(
            f"[engine.extra] has {found[0]}: probes, objectives and updates of weights are not made for it; "
            f"leave it out, and write engine.dtype or engine.kv_cache_dtype"
        )


def numbers(dtype: str) -> dict[str, str]:
    """Return vLLM's options for a type of weights and activations."""
    return {"dtype": "bfloat16", "quantization": PER_CHANNEL} if dtype == FP8 else {"dtype": dtype}


def flags_of(config: Mapping[str, Any], *, on_gpu: bool) -> list[str]:
    """Return the arguments that a device and a model need, of which `config` is the config.json."""
    flags = ["--language-model-only"] if "text_config" in config else []  # images would need a tokenizer
    if not on_gpu:
        flags.append("--enforce-eager")
    elif has_delta_nets(config):
        flags.append("--gdn-prefill-backend=triton")  # FlashInfer's kernels would be compiled on the node
    return flags


def environment(token: str, *, on_cpu: bool) -> dict[str, str]:
    """Return this process's variables and those that vLLM needs.

    Inherited settings of vLLM are left out: VLLM_CPU_KVCACHE_SPACE, for one, overrides kv_cache_bytes. So is
    the rank of the supervisor among the processes of its job.
    """
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(NOT_INHERITED)}
    here = str(Path(__file__).parents[4])
    always = {
        TOKEN: token,
        "PYTHONPATH": os.pathsep.join(filter(None, [here, inherited.get("PYTHONPATH")])),
        "VLLM_SERVER_DEV_MODE": "1",  # without it there are no control routes
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",  # an agent's tools take longer than the default of 5 s
    }
    of_cpu = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise two engines of a node share core 0
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a CPU then allows one process for core and worker
        "TORCHDYNAMO_DISABLE": "1",  # otherwise it compiles at the first request; without g++ it ends
    }
    return inherited | always | (of_cpu if on_cpu else {})
