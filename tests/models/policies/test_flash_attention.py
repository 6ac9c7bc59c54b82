"""GPU, model and packages decide which kernels compute attention; each user has a folder of them."""

import os

import pytest

torch = pytest.importorskip("torch")

from hpc_swe.models.policies._megatron.kernels.flash_attention import (  # noqa: E402
    INSTALL,
    Facts,
    choose,
    describe,
    kernel_folder,
)
from tests.kit.checkout import ROOT  # noqa: E402

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "is_installed", "kernels"),
    [
        (9, BF16, 128, True, "flash-attn-4"),
        (10, BF16, 64, True, "flash-attn-4"),
        (9, BF16, 128, False, "cuDNN"),
        (9, BF16, 96, True, "cuDNN"),
        (8, BF16, 128, True, "cuDNN"),
        (12, BF16, 128, True, "cuDNN"),
        (9, torch.float32, 128, True, "torch"),
        (0, BF16, 128, True, "torch"),
    ],
)
def test_kernels_are_those_that_fit_the_gpu_and_the_model(capability, dtype, head_dim, is_installed, kernels):
    assert choose(Facts(capability, dtype, head_dim, is_installed)) == kernels


@pytest.mark.parametrize(("capability", "is_installed"), [(9, False), (9, True), (8, False)])
def test_the_log_says_what_to_install_only_where_that_helps(capability, is_installed):
    said = describe(Facts(capability, BF16, 128, is_installed))
    assert (INSTALL in said) == (capability == 9 and not is_installed)


def test_what_the_log_says_to_install_is_there():
    assert (ROOT / INSTALL.split()[-1]).is_file()


def test_compiled_kernels_are_kept_in_a_folder_of_this_user_alone(tmp_path):
    folder = kernel_folder(tmp_path)
    assert (folder.parent, folder.stat().st_mode & 0o777) == (tmp_path, 0o700)
    assert kernel_folder(tmp_path) == folder


@pytest.mark.parametrize("kind", ["file", "link", "open"])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, kind):
    name = tmp_path / f"hpc_swe-kernels-{os.getuid()}"
    if kind == "file":
        name.touch()
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        name.symlink_to(tmp_path / "elsewhere")
    else:
        name.mkdir()
        name.chmod(0o777)
    assert kernel_folder(tmp_path) != name
    assert kernel_folder(tmp_path).stat().st_mode & 0o777 == 0o700
