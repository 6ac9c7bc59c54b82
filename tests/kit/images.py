"""The task image in which tests of the real sandbox run."""

import shutil
from pathlib import Path

import pytest

from tests.kit.checkout import IMAGES

UNPACKED = IMAGES / "python-pytest"


def require_apptainer(image: Path = IMAGES / "python-pytest.sif") -> None:
    """Skip the test where Apptainer or the task image is missing."""
    if shutil.which("apptainer") is None or not image.exists():
        pytest.skip(f"Apptainer or {image} is missing: containers/build_image.sh")
