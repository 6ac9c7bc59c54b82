"""A small environment, for jobs without torch, and the file that containers/build_runtime.sh makes of it."""

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.kit.checkout import ROOT


def make_environment(folder: Path, *more: str) -> None:
    """Copy the packages that pyproject.toml asks for, and more, into an environment of their own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for distribution in _closure([*project["dependencies"], *more]):
        for file in distribution.files or ():
            if ".." not in file.parts:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(distribution.locate_file(file)), site / file)


def pack(environment: Path, file: Path) -> None:
    if shutil.which("mksquashfs") is None or shutil.which("unsquashfs") is None:
        pytest.skip("squashfs-tools are missing: apt-get install squashfs-tools")
    subprocess.run([ROOT / "containers/build_runtime.sh", environment, file], check=True)


def _closure(left: list[str]) -> list[importlib.metadata.Distribution]:
    found: dict[str, importlib.metadata.Distribution] = {}
    while left:
        wanted = Requirement(left.pop())
        if wanted.name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        with suppress(importlib.metadata.PackageNotFoundError):  # clients of Docker, which nothing imports
            found[wanted.name] = importlib.metadata.distribution(wanted.name)
            left += found[wanted.name].requires or []
    return list(found.values())
