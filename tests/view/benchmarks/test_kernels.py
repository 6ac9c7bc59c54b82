"""Kernels are counted once, in the class that their names say."""

import pytest

from hpc_swe.view.benchmarks.kernels import IDLE, OTHER, class_of, covered, summarize


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64", "matrix products"),
        ("void cutlass::device_kernel<at::cuda::detail::GroupedGemm>", "matrix products"),
        ("aten::mm", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, silu>", OTHER),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", OTHER),
        ("aten::_to_copy", "copies"),
    ],
)
def test_a_kernel_is_classed_by_its_name(name, kind):
    assert class_of(name) == kind


def test_idle_is_what_no_kernel_covers():
    times = summarize([("gemm", 0.0, 2.0), ("nccl", 1.0, 3.0), ("x", 5.0, 6.0)], wall_s=10.0)
    assert times.seconds == {"matrix products": 2.0, "communication": 2.0, OTHER: 1.0, IDLE: 6.0}
    assert covered([(5, 6), (0, 2), (1, 3)]) == 4.0
    assert times.longest[0][1:] == (2.0, 1)
    assert times.waiting == 1.0, "a product runs beside half of the communication"
