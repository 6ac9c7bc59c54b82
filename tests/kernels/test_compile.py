"""Triton compiles the kernels that tests without a GPU interpret: it refuses programs that these take."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="tests/kit/install_packages.sh installs it")
pytest.importorskip("megatron.core")

from tests.kit.checkout import ROOT  # noqa: E402


@pytest.mark.parametrize("words", [["90"], ["80", "once"]], ids=lambda words: words[0])
def test_all_kernels_compile_for_a_gpu(tmp_path: Path, words: list[str]) -> None:
    """What Triton's language refuses does not depend on the GPU, so one is compiled for with all values."""
    changed = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    changed |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.compile_kernels", *words],
        cwd=ROOT,
        env=changed,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "kernels" in done.stdout, "it names those that it leaves out"
