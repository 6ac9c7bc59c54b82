"""Say which layers of vLLM's model do not keep weights as loaded: python -m tests.kit.plain_layers MODEL.

It prints JSON: why deltas could not be written in place on a CPU, and on a GPU with each kind of kernels that
compute experts; an empty text where they can.
"""

import json
import sys

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.model_loader.utils import initialize_model

from hpc_swe.cluster.processes import free_port
from hpc_swe.models.engines._vllm.plain import require_plain


def refusal(model: torch.nn.Module) -> str:
    try:
        require_plain(model)
    except ValueError as error:
        return str(error)
    return ""


def main(folder: str) -> None:
    config = EngineArgs(
        model=folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True
    ).create_engine_config()
    with set_current_vllm_config(config):
        port = free_port("127.0.0.1")
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1)
        model = initialize_model(vllm_config=config)
    found = {"on a CPU": refusal(model)}
    model.to("meta")  # no CPU's, as on a GPU
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    experts = [each for each in methods if hasattr(each, "unquantized_backend")]
    for backend in UnquantizedMoeBackend:
        for method in experts:
            method.unquantized_backend = backend
        found[backend.name] = refusal(model)
    for method in experts:
        method.unquantized_backend = UnquantizedMoeBackend.TRITON
        method.moe.moe_parallel_config.enable_eplb = True
    found["moved"] = refusal(model)
    print(json.dumps({"experts": len(experts)} | found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
