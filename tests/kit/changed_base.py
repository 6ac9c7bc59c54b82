"""Two workers of vLLM that load adapters by its reload: python -m tests.kit.changed_base FOLDER.

For the second one the files of the model below the adapters change between the staging and the swap. They are
forked from a process that has imported vLLM, which takes longer than all else.
"""

import multiprocessing
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from hpc_swe.models.deltas.tensor_delta import Digests, text
from hpc_swe.models.engines._vllm import worker as worker

OLD = torch.linspace(-1, 1, 4000, dtype=torch.bfloat16).view(40, 100)


class Model(torch.nn.Module):
    """Its loader copies whole tensors, as that of a model which vLLM packs."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.a = torch.nn.Linear(100, 40, bias=False, dtype=torch.bfloat16)
        self.a.weight.data.copy_(weight)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            parameter = self.get_parameter(name)
            vars(parameter).get("weight_loader", default_weight_loader)(parameter, tensor)


def write(base: Path, version: Path) -> torch.Tensor:
    """Write a model and a version of its adapters; return the merged weight."""
    a, b = torch.ones(3, 100, dtype=torch.bfloat16), torch.ones(40, 3, dtype=torch.bfloat16)
    for each in (base, version):
        each.mkdir()
    save_file({"a.weight": OLD}, base / "model.safetensors")
    names = ("base_model.model.a.lora_A.weight", "base_model.model.a.lora_B.weight")
    save_file(dict(zip(names, (a, b), strict=True)), version / "adapter_model.safetensors")
    (version / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 6}')
    return (OLD.double() + 2 * (b.double() @ a.double())).bfloat16()


def load(folder: Path, is_changed: bool) -> None:
    folder.mkdir()
    base, version = folder / "model", folder / "v000003-i01"
    merged = write(base, version)
    digest = text(int(Digests(torch.device("cpu")).tensor(merged)))
    text_config = SimpleNamespace(tie_word_embeddings=False)
    of_model = SimpleNamespace(
        dtype=torch.bfloat16, model=str(base), hf_text_config=text_config, quantization=None
    )
    config = SimpleNamespace(model_config=of_model, parallel_config=SimpleNamespace())
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder.absolute()}/meeting", 0, "gloo")
        initialize_model_parallel(1)
    model = Model(OLD)
    record_metadata_for_reloading(model)  # as vLLM does before it loads a model
    transfer = worker.FolderTransfer(SimpleNamespace(), config, torch.device("cpu"), model)
    transfer.start_weight_update()
    transfer.receive_weights(
        worker.Folder(
            path=str(version),
            parents=[{"path": str(base), "files": None}],
            dtypes={"a.weight": "bfloat16"},
            digests={"a.weight": digest},
        )
    )
    until = time.monotonic() + 60
    while not transfer.is_staged():
        assert time.monotonic() < until, "nothing was staged"
        time.sleep(0.01)
    if is_changed:
        save_file({"a.weight": OLD * 2}, base / "model.safetensors")
    transfer.finish_weight_update()
    assert torch.equal(model.a.weight.data, merged)
    print("served the merged weights", flush=True)


def main() -> None:
    fork, codes = multiprocessing.get_context("fork"), []
    for is_changed in (False, True):
        process = fork.Process(target=load, args=(Path(sys.argv[1]) / str(is_changed), is_changed))
        process.start()
        process.join()
        codes.append(process.exitcode)
    print("exit codes", codes)


if __name__ == "__main__":
    main()
