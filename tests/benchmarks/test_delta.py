"""What a delta between two versions takes."""

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from hpc_swe.benchmarks.delta import measure  # noqa: E402
from hpc_swe.errors import ConfigError  # noqa: E402


def test_a_tenth_of_a_step_changes_fewer_values_than_all_of_it(tmp_path):
    torch.manual_seed(0)
    old = torch.randn(100, 1000) * 0.02
    for name, tensor in (("old", old), ("new", old + 1e-5 * torch.randn_like(old).sign())):
        (tmp_path / name).mkdir()
        save_file({"a": tensor}, tmp_path / name / "model.safetensors")
    whole, tenth = (measure(tmp_path / "old", tmp_path / "new", share) for share in (1.0, 0.1))
    assert whole.values == tenth.values == 100_000
    assert whole.whole_bytes == tenth.whole_bytes == 200_000
    assert whole.changed > 3 * tenth.changed > 0
    assert whole.delta_bytes > tenth.delta_bytes > 0


def test_versions_with_other_files_are_refused(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "old" / "model.safetensors")
    with pytest.raises(ConfigError, match="give two full versions"):
        measure(tmp_path / "old", tmp_path / "new", 1.0)


def test_a_share_of_steps_between_rounded_values_is_refused(tmp_path):
    """Such a step is none or at least one last place, so a tenth of it would change nothing."""
    for name, value in (("old", 1.0), ("new", 1.0 + 2**-7)):
        (tmp_path / name).mkdir()
        save_file({"a": torch.full((4,), value).bfloat16()}, tmp_path / name / "model.safetensors")
    assert measure(tmp_path / "old", tmp_path / "new", 1.0).changed == 4
    with pytest.raises(ConfigError, match="--share needs float32"):
        measure(tmp_path / "old", tmp_path / "new", 0.1)
