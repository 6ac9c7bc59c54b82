"""Deltas as a learner spreads them over files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hpc_swe.plugins.engines._vllm_files import Delta, Wanted
from hpc_swe.plugins.tensor_delta import encode

OLD = torch.linspace(-1, 1, 4000, dtype=torch.bfloat16).view(40, 100)
WANTED = Wanted({"a": [40, 100]}, is_tied=False, dtypes={"a": "bfloat16"})


def written(folder: Path) -> torch.Tensor:
    new = OLD.clone()
    new[::7, ::9] *= 3
    changes = encode(OLD, new)
    assert changes is not None
    save_file({"a:codes": changes.codes}, folder / "delta-00001-of-00002.safetensors")
    save_file({"a:others": changes.others}, folder / "delta-00002-of-00002.safetensors")
    return new


def test_the_two_parts_of_a_tensor_may_lie_in_two_files(tmp_path: Path) -> None:
    new, found = written(tmp_path), OLD.clone()
    Delta.read(tmp_path, WANTED).apply("a", found)
    assert torch.equal(found, new)


def test_half_of_a_tensor_s_changes_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "delta-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="a:others is missing"):
        Delta.read(tmp_path, WANTED)
