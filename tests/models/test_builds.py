"""What is found out about the builds of torch and vLLM, and what is refused for it."""

import os
import subprocess
import sys

import pytest
import torch

from hpc_swe.base.errors import NodeError
from hpc_swe.models import builds
from hpc_swe.models.builds import Builds
from hpc_swe.models.engines.scripted import Scripted
from hpc_swe.models.engines.vllm import Vllm
from hpc_swe.models.policies.megatron import Megatron
from tests.kit.checkout import ROOT, environment
from tests.kit.waiting import DEADLINE_S

CPU = Builds(torch="2.13.0+cpu", vllm="0.32.0+cpu")
GPU = Builds(torch="2.11.0", torch_cuda="13.0", vllm="0.26.0", driver_cuda="13.1")
VERSION = """\
from typing import Optional
__version__ = '9.1.0'
debug = False
cuda: Optional[str] = {cuda}
hip: Optional[str] = {hip}
"""


@pytest.mark.parametrize(
    ("cuda", "hip", "built_for"), [("None", "None", ""), ("'13.0'", "None", "13.0"), ("None", "'7.0'", "7.0")]
)
def test_the_build_of_torch_is_read_without_importing_it(tmp_path, cuda, hip, built_for):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch/version.py").write_text(VERSION.format(cuda=cuda, hip=hip))
    line = (
        "from hpc_swe.models import builds; found = builds.installed(); print(found.torch, found.torch_cuda)"
    )
    env = environment() | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", line], env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.stdout.split() == ["9.1.0", *built_for.split()], done.stderr


@pytest.mark.parametrize(
    ("plugin", "found", "problem"),
    [
        (Megatron(), CPU, "policy.device = 'gpu', but torch 2.13.0+cpu is a build for CPUs"),
        (Megatron(device="cpu"), CPU, ""),
        (Megatron(device="cpu"), GPU, ""),
        (Megatron(), GPU, ""),
        (Megatron(), Builds(), ""),  # nothing is known
        (
            Megatron(),
            Builds(torch="2", torch_cuda="13.0", driver_cuda="12.8"),
            "the driver supports CUDA 12.8",
        ),
        (Megatron(), Builds(torch="2", torch_cuda="12.8", driver_cuda="12.2"), ""),
        (Vllm(), CPU, "engine.device = 'gpu', but vLLM 0.32.0+cpu is a build for CPUs"),
        (Vllm(device="cpu"), CPU, ""),
        (Vllm(device="cpu"), GPU, "engine.device = 'cpu', but vLLM 0.26.0 is a build for GPUs"),
        (Vllm(), GPU, ""),
        (Vllm(), Builds(torch="2+cpu", vllm="0.26.0"), "engine.device = 'gpu', but torch 2"),
        (Vllm(program="/other/vllm"), CPU, ""),
    ],
)
def test_a_build_for_another_device_is_named_with_its_key(plugin, found, problem):
    said = plugin.build_problem(found)
    assert bool(said) == bool(problem)
    assert problem in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_policy_for_a_gpu_does_not_train_on_a_cpu():
    from hpc_swe.models.policies._megatron.model.parallel import TorchRanks

    with pytest.raises(NodeError, match="policy.device = 'gpu', but torch .* is a build for CPUs"):
        TorchRanks(Megatron())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_an_engine_for_a_gpu_does_not_start_with_a_build_for_cpus():
    builds.require(Scripted(replies="never.json"))
    builds.require(Vllm(device="cpu"))
    with pytest.raises(NodeError, match="engine.device = 'gpu', but vLLM .* is a build for CPUs"):
        builds.require(Vllm())
