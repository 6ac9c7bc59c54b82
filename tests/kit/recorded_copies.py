"""Check what is known of a loader's copies: python -m tests.kit.recorded_copies FOLDER...

FOLDER has the models old and new. Each of two ranks builds vLLM's model with its part of the old weights, as
before a CPU packs them, changes it to the new ones in two ways, and compares both with what vLLM's loader
makes of the new ones. If the folder's name ends in ep, experts are not divided, and each rank has some of
them. Ranks are forked from a process that has imported vLLM, which takes longer than all else.
"""

import multiprocessing
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import qwen2, qwen3_moe  # noqa: F401

from hpc_swe.cluster.processes import free_port
from hpc_swe.models.deltas.tensor_delta import Digests, encode
from hpc_swe.models.engines._vllm.copies import LoaderCopies
from hpc_swe.models.engines._vllm.files import Delta
from hpc_swe.models.weight_files import UNTRAINED

SIZE = 2


def gather(value: list[Any]) -> list[list[Any]]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def compare(copies: LoaderCopies, tensors: dict[str, torch.Tensor]) -> None:
    """Check that all ranks together hold these tensors."""
    computer = Digests(torch.device("cpu"))
    found = copies.digests(gather)
    whole = {name: int(computer.tensor(tensor)) for name, tensor in tensors.items()}
    assert {n: v % 2**64 for n, v in found.items()} == {n: v % 2**64 for n, v in whole.items()}


def read(path: Path) -> dict[str, torch.Tensor]:
    return {name: each for name, each in load_file(path).items() if not name.startswith(UNTRAINED)}


def check(rank: int, port: int, folder: Path) -> None:
    before, after = (read(folder / name / "model.safetensors") for name in ("old", "new"))
    is_whole, is_hybrid = folder.name.endswith("ep"), folder.name == "hybrid"
    shapes = {name: list(tensor.shape) for name, tensor in before.items()}
    config = EngineArgs(
        model=str(folder / "old"),
        dtype="bfloat16" if is_hybrid else "float32",
        language_model_only=is_hybrid,
        enforce_eager=True,
        tensor_parallel_size=SIZE,
        enable_expert_parallel=is_whole,
        skip_tokenizer_init=True,
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(SIZE, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(SIZE)
        models = [initialize_model(vllm_config=config, prefix=prefix) for prefix in ("", "again")]
    for model, tensors in zip(models, (before, after), strict=True):
        model.load_weights(iter(tensors.items()))
    changed, expected = (dict(model.named_parameters()) for model in models)

    copies = LoaderCopies.record(models[0], shapes, config.model_config.dtype)
    assert all(map(copies.holds, shapes)) != is_whole
    compare(copies, before)
    changes = {name: encode(before[name], tensor) for name, tensor in after.items()}
    whole = {name: after[name] for name, each in changes.items() if each is None}
    assert 0 < len(whole) < len(changes)
    delta = Delta({name: each for name, each in changes.items() if each is not None}, whole)
    patches = copies.patches(delta)
    compare(copies, before)
    copies.write(patches)
    compare(copies, after)
    differs = copies.compare({name: -tensor for name, tensor in after.items()})
    assert differs is None, "the differences take more than a quarter of the weights"
    copies.copy(before)
    slightly = {name: each if "norm" in name else before[name] for name, each in after.items()}
    copies.write(copies.compare(slightly) or [])
    compare(copies, slightly)
    copies.copy(after)
    compare(copies, after)
    assert all(torch.equal(changed[name], tensor) for name, tensor in expected.items())


def main() -> None:
    fork = multiprocessing.get_context("fork")
    for folder in map(Path, sys.argv[1:]):
        port = free_port("127.0.0.1")
        os.environ["VLLM_DIST_IDENT"] = name = secrets.token_hex(8)  # of shared memory, which nobody removes
        ranks = [fork.Process(target=check, args=(rank, port, folder)) for rank in range(SIZE)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        for left in Path("/dev/shm").glob(f"{name}-*"):  # noqa: S108
            left.unlink()
        is_equal = all(rank.exitcode == 0 for rank in ranks)
        print(folder.name, "all bits are equal" if is_equal else "differs", flush=True)


if __name__ == "__main__":
    main()
