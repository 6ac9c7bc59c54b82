"""What a delta between two versions takes, as the command says it."""

import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from tests.kit.checkout import ROOT, environment


@pytest.mark.slow
def test_a_tenth_of_a_step_changes_fewer_values_than_all_of_it(tmp_path):
    torch.manual_seed(0)
    old = torch.randn(100, 1000) * 0.02
    for name, tensor in (("old", old), ("new", old + 1e-5 * torch.randn_like(old).sign())):
        (tmp_path / name).mkdir()
        save_file({"a": tensor}, tmp_path / name / "model.safetensors")
    command = [sys.executable, "-m", "hpc_swe.benchmarks.delta", str(tmp_path / "old"), str(tmp_path / "new")]
    found = []
    for more in ((), ("--share", "0.1")):
        changed = environment(OMP_NUM_THREADS="1")
        done = subprocess.run(
            [*command, *more], cwd=ROOT, env=changed, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        found.append([float(word) for word in re.findall(r"([\d.]+) %", done.stdout)])
    assert found[0][0] > 3 * found[1][0] > 0
    assert found[0][1] > found[1][1] > 0
    (tmp_path / "new" / "model.safetensors").unlink()
    done = subprocess.run(command, cwd=ROOT, env=changed, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "give two full versions" in done.stderr
